"""The command lines of the tools that look at models: help with an example, and one real call."""

import csv
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np


def test_get_flops(tools: Any) -> None:
    out = tools('get_flops.py', 'vittt_t_in1k', '--depth', '1')
    assert re.search(r'backbone +6,783,240 +1\.459', out)
    assert 'ttt_kernels.ttt_linear' in out
    assert 'vittt_t_in1k at 224×224: 6.976 M parameters, 1.459 GFLOPs' in out
    shape = ('--shape', '225', '333')
    assert '225×333' in tools('get_flops.py', 'vittt_t_in1k', *shape)
    four = ('--cfg-options', 'model.backbone.in_channels=4')
    assert '7.025 M' in tools('get_flops.py', 'vittt_t_in1k', *four)
    out = tools('get_flops.py', 'vittt_t_in1k', '--backbone')
    assert '6.783 M parameters, 1.459 GFLOPs' in out


def test_get_flops_names_what_did_not_run(tools: Any) -> None:
    args = ('get_flops.py', 'upernet_hvit3_t_160k', '--shape', '64', '64')
    assert 'found in the image: auxiliary_head\n' in tools(*args)
    assert 'found in the image' not in tools(*args, '--backbone')


def test_benchmark_by_computation(tools: Any, tmp_path: Path) -> None:
    table, picture = tmp_path / 'rows.csv', tmp_path / 'rows.png'
    tools(
        *('benchmark.py', 't5_tiny_patch16_224', 'deit_tiny_patch16_224', '--computed'),
        *('--sizes', '224', '512', '--shape', '224', '448', '--attention', 'fused', 'materialised'),
        *('--out', str(table), '--plot', str(picture), '--panels', 'gflops'),
    )
    with table.open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['ours'] for row in rows] == ['True'] * 3 + ['False'] * 2 * 3
    assert [row['width'] for row in rows[:3]] == ['224', '512', '448']
    # The formulas meet at 276 pixels.
    ours, theirs = ([float(row['gflops']) for row in rows[i : i + 2]] for i in (0, 3))
    assert [a < b for a, b in zip(ours, theirs, strict=True)] == [False, True]
    assert picture.is_file()
    detector = ('maskrcnn_vittt_t_1x', '--shape', '100', '140', '--backbone', '--computed')
    out = tools('benchmark.py', *detector, '--out', str(table))
    assert '1 × 100×140:' in out


def test_benchmark_ends_at_a_missing_model(tools: Any, tmp_path: Path) -> None:
    out = tmp_path / 'table.csv'
    options = ('--sizes', '32', '--repeats', '1', '--out', str(out), '--device', 'cpu')
    error = tools.error('benchmark.py', 'resnet18', '--cuda-graph', '--train', *options, status=2)
    assert '--cuda-graph are for inference' in error
    error = tools.error('benchmark.py', 'resnet18', 'resnet1800', *options)
    assert "there is no model 'resnet1800'" in error
    assert [line.split(',')[0] for line in out.read_text().splitlines()] == ['line', 'resnet18']


def test_image_demo(tools: Any, tmp_path: Path) -> None:
    """A folder with pictures is no checkpoint, nor is a picture with a colon in its name."""
    (folder := tmp_path / 'export').mkdir()
    photo = folder / 'at 12:30.png'
    cv2.imwrite(str(photo), np.full((40, 40, 3), 200, np.uint8))
    for other in ('_annotations.coco.json', 'best.pt'):
        (folder / other).touch()
    line = ('--out', tmp_path / 'out', '--device', 'cpu')
    out = tools('image_demo.py', 'cifar10_vittt_nano', folder, *line)
    assert re.search(r'12:30\.png: [a-z]+ 0\.\d+; [a-z]+ 0\.\d+; .* → .*12:30\.png', out)
    assert (tmp_path / 'out' / photo.name).is_file()
    tools('image_demo.py', 'cifar10_vittt_nano', photo, *line)


def test_an_export_says_whose_weights_it_has(tools: Any, tmp_path: Path) -> None:
    line = ('--shape', '64', '64', '--fixed-size', '--out')
    said = tools('export.py', 'pedestrians', *line, tmp_path / 'a.pt2')
    assert 'weights of mmvttt://maskrcnn_vittt_nano_pedestrians' in said
    assert 'random' not in said
    said = tools('export.py', 'vittt_tiny_patch16_224', *line, tmp_path / 'b.pt2')
    assert said.rstrip().endswith('b.pt2, with random weights: give --checkpoint')
