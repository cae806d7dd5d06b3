"""Two OpenMMLabs over one another are an error with its remedy; hints fit what is there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mmvttt import distributions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`install('name', …)`: distributions by their metadata alone."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(*names: str) -> None:
        for name in names:
            folder = tmp_path / f'{name.replace("-", "_")}-9.9.dist-info'
            folder.mkdir()
            (folder / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n')

    return install


def test_the_remedy_names_all_of_both(install: Callable[..., None]) -> None:
    install('mmengine', 'onedl-mmengine', 'mmcv', 'mmcv-lite', 'onedl-mmsegmentation')
    problem = distributions.overlaid()
    assert problem is not None
    assert 'mmengine (mmengine 9.9 and onedl-mmengine 9.9)' in problem
    assert 'mmcv (mmcv 9.9 and mmcv-lite 9.9' in problem
    removed = problem.partition('pip uninstall -y ')[2].partition(',')[0].split()
    assert {'mmengine', 'onedl-mmengine', 'mmcv-lite', 'mmcv'} <= set(removed)
    assert "'mmvttt[lite" in problem
    assert "'mmvttt[onedl-det,onedl-seg" in problem


def test_train_stops_with_it(install: Callable[..., None], tools: Callable) -> None:
    install('mmengine', 'onedl-mmengine')
    printed = tools.error('train.py', ROOT / 'configs' / 'maskrcnn_vittt_demo.py')
    assert 'error: two distributions lie over one another: mmengine' in printed


@pytest.mark.parametrize(
    ('there', 'extra'),
    [({'mmengine', 'mmcv-lite'}, 'seg'), ({'onedl-mmengine', 'onedl-mmcv'}, 'onedl-seg')],
)
def test_the_extra_for_a_missing_toolbox(
    there: set[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, 'is_installed', there.__contains__)
    assert distributions.extra('mmseg') == extra
    assert distributions.extra('somebodys') is None
