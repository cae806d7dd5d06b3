"""Command lines of the tools with wrong files, names and numbers: one sentence, no traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmvttt import distributions

from ..data.sets import coco, coco_dataset, config, make_coco, write

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / 'configs/maskrcnn_vittt_demo.py')
QUICK = ('vittt_tiny_patch16_224', '--sizes', '32', '--repeats', '1', '--device', 'cpu')


@pytest.fixture
def run(tools: Any) -> Callable[..., str]:
    """The error of a tool with these arguments, in a folder of its own."""
    Path('text.txt').write_text('neither weights nor a picture')
    torch.save({'state_dict': {'encoder.weight': torch.zeros(3)}}, 'other.pth')
    Path('empty').mkdir()
    return lambda tool, *args, **options: tools.error(f'{tool}.py', *args, **options)


# Tool, arguments before the wrong value, the wrong values, exit status, words of the error.
NUMBERS = ('0', '1.5', '')
DEVICES = ('gpu', *(() if torch.cuda.is_available() else ('cuda',)))
NO_CONFIG = ('no.py', 'empty')
WRONG: list[tuple[tuple[str, ...], tuple[str, ...], int, tuple[str, ...]]] = [
    (('get_flops', 'vittt_t_in1k', '--depth'), NUMBERS, 2, ('--depth', '1 or more')),
    (('get_flops', 'vittt_t_in1k', '--shape', '64'), NUMBERS, 2, ('--shape', '1 or more')),
    (('train', 'c.py', '--cfg-options', 'a=1'), ('nonsense',), 2, ('write KEY=VALUE',)),
    (('benchmark', QUICK[0], '--device'), DEVICES, 2, ('is not there',)),
    *(((tool,), NO_CONFIG, 1, ('error: there is no ',)) for tool in ('check_data', 'train')),
]


@pytest.mark.parametrize(('args', 'values', 'status', 'words'), WRONG)
def test_wrong_values(run: Callable, args: tuple, values: tuple, status: int, words: tuple) -> None:
    for value in values:
        error = run(*args, value, status=status)
        assert all(word in error for word in (*words, repr(value))), error


WORDS = {
    ('check_data', DEMO, '--splits', 'x'): ("'x'", 'val'),
    ('benchmark', QUICK[0], '--dtype', 'x'): ("'x'", 'bfloat16'),
    ('train', DEMO, '--launcher', 'x'): ("'x'", 'slurm'),
    ('get_flops', 'no_model'): ("no model 'no_model'", 'vittt_t_in1k'),
    ('get_flops', 'vitt_s_in1k'): ("did you mean 'vittt_s_in1k'",),
    ('benchmark', *QUICK[1:], 'deit_tiny_patch16_224', '--backbone'): (
        'deit_tiny',
        'no part',
        '(--backbone)',
    ),
    ('image_demo', DEMO, 'other.pth', 'no.jpg'): ("no image 'no.jpg'",),
    ('image_demo', DEMO, 'other.pth', 'text.txt'): ("'text.txt'", 'not an image'),
    # Before the weights are fetched.
    ('image_demo', 'scope.py', 'no.pth', 'no.jpg'): ("default_scope is 'mmnone'",),
    ('publish_checkpoint', 'other.pth', 'out.txt'): ("'out.txt'", '.pth'),
    **{
        ('publish_checkpoint', file, 'a.pth'): (repr(file),)
        for file in ('no.pth', 'text.txt', 'empty')
    },
    ('get_flops', 'nothing.py'): ('has no model',),
    ('get_flops', QUICK[0], '--cfg-options', 'pretrained=True'): ("{'pretrained': True}: No",),
    ('get_flops', 'vit_tiny_patch16_224', '--cfg-options', 'num_heads=5'): ("{'num_heads': 5}: ",),
    ('check_data', 'nothing.py'): ('nothing to check',),
}


@pytest.mark.parametrize('args', WORDS)
def test_wrong_words_files_and_configs(run: Callable, args: tuple) -> None:
    Path('nothing.py').write_text("default_scope = 'mmdet'\n")
    Path('scope.py').write_text("default_scope = 'mmnone'\nmodel = dict(type='X')\n")
    error = run(*args, status=2 if args[-1] == 'x' else 1)
    assert all(word in error for word in WORDS[args]), error


# A folder where a file shall be written, and a file where a folder shall.
@pytest.mark.parametrize(
    'args',
    [
        ('publish_checkpoint', 'other.pth', 'empty'),
        ('test', DEMO, 'other.pth', '--out', 'empty'),
        ('test', DEMO, 'other.pth', '--show-dir', 'text.txt'),
    ],
)
def test_outputs_are_tried_before_the_work(run: Callable, args: tuple) -> None:
    assert f"{args[-1]}'" in run(*args, status=2)


def test_check_data(tools: Any, tmp_path: Path) -> None:
    """Errors make the exit status 1, warnings don't."""
    pytest.importorskip('mmdet')
    root = tmp_path / 'set'
    make_coco(root)
    config(coco_dataset(root)).dump(tmp_path / 'cfg.py')
    args = ('check_data.py', tmp_path / 'cfg.py', '--splits', 'train')
    text = tools.error(*args, status=0)
    assert '  nothing wrong\n1 data sets, 0 of them with errors\n' in text
    content = coco()
    content['annotations'][0]['bbox'][2] = 0
    write(root, content)
    assert '1 × objects that are not learned, without area' in tools.error(*args, status=0)
    content['annotations'][1]['category_id'] = 5
    content['annotations'][3]['category_id'] = 6
    write(root, content)
    (root / 'images/1.jpg').write_bytes((root / 'images/1.jpg').read_bytes()[:900])
    text = tools.error(*args)
    assert '  warning  2 × annotations whose category_id is not listed' in text
    assert 'truncated' in text
    assert '1 data sets, 1 of them with errors' in text
    assert 'truncated' not in tools.error(*args, '--no-images', status=0)
    (root / 'b.json').write_text('{}')
    evaluator = dict(type='CocoMetric', ann_file=str(root / 'b.json'))
    config(coco_dataset(root), split='val', val_evaluator=evaluator).dump(tmp_path / 'val.py')
    text = tools.error('check_data.py', tmp_path / 'val.py', '--no-images')
    assert "  error    val_evaluator.ann_file is '" in text


def test_a_missing_toolbox_is_named_with_its_extra(run: Callable, tools: Any) -> None:
    # A base that no other test asks for: what was found once is remembered.
    Path('config.py').write_text("_base_ = 'mmdet::_base_/schedules/schedule_20e.py'\n")
    tools.patch.setattr('mmvttt.openmmlab.compat.configs.find_spec', lambda package: None)
    extra = 'onedl-det' if distributions.providers('mmdet') == ['onedl-mmdetection'] else 'det'
    assert f"pip install 'mmvttt[{extra}]'" in run('train', 'config.py')
