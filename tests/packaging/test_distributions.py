"""The built distributions: their files, and an installation from the wheel used by stock tools.

Stock tools are those that mmdet, mmsegmentation and mmpretrain ship, which know nothing of mmvttt.
Building and installing takes minutes; tests/packaging/test_wheel_files.py reads the list alone.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
REPOSITORY = 'https://example.org/somebody/mmvttt'
pytestmark = pytest.mark.stress


def call(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        # Compiling the CPU's kernels would take longer than the runs.
        env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
        | {'TTT_KERNELS_BACKEND': 'reference'}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f'{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}'
    return done.stdout + done.stderr


@pytest.fixture(scope='module')
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build`: the source distribution, and the wheel that is built from it."""
    source = tmp_path_factory.mktemp('source') / 'mmvttt'
    skipped = shutil.ignore_patterns('.*', '*.egg-info', '__pycache__')
    top = {'work_dirs', 'data', 'build', 'dist'}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return skipped(folder, names) | (top if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, source, ignore=ignored)
    build = (sys.executable, '-m', 'build', '--no-isolation')
    call(*build, cwd=source, MMVTTT_REPOSITORY=REPOSITORY + '/')
    return source / 'dist'


@pytest.fixture(scope='module')
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheel; everything else is where it was."""
    place = tmp_path_factory.mktemp('environment')
    call(sys.executable, '-m', 'venv', '--without-pip', 'env', cwd=place)
    python = place / 'env' / 'bin' / 'python'
    (site,) = (place / 'env' / 'lib').glob('python3*/site-packages')
    # Paths alone: lines of .pth files there, such as an editable mmvttt's, do not run.
    others = {Path(find_spec(name).origin).parents[1] for name in ('mmengine', 'numpy', 'pytest')}
    (site / 'zz_others.pth').write_text('\n'.join(sorted(map(str, others))))
    (wheel,) = dist.glob('*.whl')
    pip = [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet']
    call(*pip, '--no-deps', '--force-reinstall', wheel, cwd=place)
    return python


def test_the_wheel_has_the_files_that_setup_copies(dist: Path, wheel_files: set[str]) -> None:
    (wheel,) = dist.glob('*.whl')
    names = {n for n in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in n}
    assert names == wheel_files


def test_the_page_of_an_index_shows_pictures_and_leads_to_the_docs(dist: Path) -> None:
    (wheel,) = dist.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith('.dist-info/METADATA'))
        page = archive.read(name).decode()
    assert f'Project-URL: Source, {REPOSITORY}\n' in page
    links = re.findall(r'(!?)\[[^\]]*\]\(([^)]*)\)', page)
    inside = [(picture, link) for picture, link in links if link.startswith(REPOSITORY)]
    assert len(inside) > 15
    for picture, link in inside:
        kind, _, path = link.removeprefix(f'{REPOSITORY}/').split('/', 2)
        assert kind == ('raw' if picture else 'blob')
        assert (ROOT / path.partition('#')[0]).exists(), link
    assert all(link.startswith(('https://', '#')) for _, link in links)


def test_the_report(python: Path, tmp_path: Path) -> None:
    printed = call(python, '-m', 'mmvttt', cwd=tmp_path)
    assert 'mmdet' in printed
    assert 'ttt_linear' in printed
    tool = call(python.parent / 'mmvttt', 'train', '--help', cwd=tmp_path)
    assert tool.startswith('usage: train.py ')
    where = call(python, '-c', 'import mmvttt; print(mmvttt.__file__)', cwd=tmp_path)
    assert str(python.parents[1]) in where


def images(folder: Path, count: int = 4) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        noise = np.random.default_rng(i).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f'{i}.png')


MMDET = """
_base_ = 'mmvttt::maskrcnn_vittt_demo.py'
data_root = 'data/'
ann_file = data_root + 'annotations/instances_val.json'
train_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(data_root=data_root))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=ann_file)
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
"""
MMSEG = """
_base_ = 'mmvttt::upernet_vittt_t_camvid.py'
data = dict(data_root='data', img_suffix='.png')
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False, dataset=data)
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=data)
test_dataloader = val_dataloader
train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = (64, 64)
train_pipeline[3].crop_size = (64, 64)
train_dataloader.update(dataset=dict(pipeline=train_pipeline, **data))
norm_cfg = dict(type='GN', num_groups=4)
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(backbone=dict(arch=dict(
        _delete_=True, embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=64))),
    decode_head=dict(in_channels=[64] * 4, channels=32, norm_cfg=norm_cfg),
    auxiliary_head=dict(in_channels=64, channels=32, norm_cfg=norm_cfg),
)
train_cfg = dict(max_epochs=1, val_interval=1)
default_hooks = dict(checkpoint=dict(interval=1, save_best=None))
"""
MMPRETRAIN = """
_base_ = 'mmvttt::vittt_t_in1k.py'
data = dict(type='CustomDataset', data_root='data', data_prefix='')
train_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False, dataset=dict(
    _delete_=True, pipeline=_base_.train_pipeline, **data))
val_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False, dataset=dict(
    _delete_=True, pipeline=_base_.test_pipeline, **data))
test_dataloader = val_dataloader
model = dict(
    backbone=dict(arch=dict(
        _delete_=True, embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=64)),
    head=dict(in_channels=64),
)
train_cfg = dict(max_epochs=2)
param_scheduler = []
"""


def detection_data(python: Path, folder: Path) -> None:
    command = [
        '-m',
        'mmvttt.openmmlab.datasets.digits',
        '--root',
        'data',
        '--num-train',
        4,
        '--num-val',
        2,
    ]
    call(python, *command, '--size', 160, cwd=folder)


def segmentation_data(python: Path, folder: Path) -> None:
    for split in ('train', 'val'):
        images(folder / 'data' / 'img_dir' / split)
        labels = folder / 'data' / 'ann_dir' / split
        labels.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((64, 64), i, np.uint8)).save(labels / f'{i}.png')


def classification_data(python: Path, folder: Path) -> None:
    for name in ('cats', 'dogs'):
        images(folder / 'data' / name)


@pytest.mark.parametrize(
    ('toolbox', 'config', 'make', 'metric'),
    [
        ('mmdet', MMDET, detection_data, 'coco/bbox_mAP'),
        ('mmseg', MMSEG, segmentation_data, 'mIoU'),
        ('mmpretrain', MMPRETRAIN, classification_data, 'accuracy/top1'),
    ],
    ids=['mmdet', 'mmseg', 'mmpretrain'],
)
def test_the_toolboxes_own_train_and_test(
    toolbox: str, config: str, make, metric: str, python: Path, tmp_path: Path
) -> None:
    make(python, tmp_path)
    (tmp_path / 'config.py').write_text(config)
    tools = Path(find_spec(toolbox).origin).parent / '.mim' / 'tools'
    call(python, tools / 'train.py', 'config.py', '--work-dir', 'run', cwd=tmp_path)
    checkpoint = (tmp_path / 'run' / 'last_checkpoint').read_text()
    printed = call(
        python, tools / 'test.py', 'config.py', checkpoint, '--work-dir', 'test', cwd=tmp_path
    )
    assert metric in printed
