"""The built distributions: their files, and an installation from the wheel used by stock tools.

Stock tools are mmdet's, which know nothing of mmvttt.
Building and installing takes minutes; tests/packaging/test_wheel_files.py reads the list alone.
"""

import os
import re
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..processes import run

ROOT = Path(__file__).parents[2]
REPOSITORY = 'https://example.org/somebody/mmvttt'
pytestmark = pytest.mark.stress


def call(*command: object, cwd: Path, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    # Compiling the CPU's kernels would take longer than the runs.
    env |= {'TTT_KERNELS_BACKEND': 'reference'} | environment
    done = run(*command, cwd=cwd, env=env)
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
    assert tool.startswith('usage: mmvttt train ')
    where = call(python, '-c', 'import mmvttt; print(mmvttt.__file__)', cwd=tmp_path)
    assert str(python.parents[1]) in where


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


def test_a_toolbox_s_own_train_and_test(python: Path, tmp_path: Path) -> None:
    sizes = '--num-train', 4, '--num-val', 2, '--size', 160
    digits = python, '-m', 'mmvttt.openmmlab.datasets.digits'
    call(*digits, '--root', 'data', *sizes, cwd=tmp_path)
    (tmp_path / 'config.py').write_text(MMDET)
    tools = Path(find_spec('mmdet').origin).parent / '.mim' / 'tools'
    call(python, tools / 'train.py', 'config.py', '--work-dir', 'run', cwd=tmp_path)
    checkpoint = (tmp_path / 'run' / 'last_checkpoint').read_text()
    test = tools / 'test.py', 'config.py', checkpoint, '--work-dir', 'test'
    assert 'coco/bbox_mAP' in call(python, *test, cwd=tmp_path)
