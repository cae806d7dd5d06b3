"""What all tests share: the patched stack, and runs of the small models in tests/trainings.

The tests of the kernels run without mmengine too, on a machine with torch and Triton alone.
"""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

if importlib.util.find_spec('mmengine'):
    # Before any test module imports mmdet, as for users.
    import mmvttt  # noqa: F401

TRAININGS = Path(__file__).parent / 'trainings'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`run('train' or 'evaluate', *args, config='tiny', **kwargs)` in a folder of its own.

    Runs within one second would share mmengine's logs, were it not for their names.
    """
    from mmvttt.apis.train import evaluate, train

    monkeypatch.syspath_prepend(str(TRAININGS))
    monkeypatch.chdir(tmp_path)
    names = iter(range(100))

    def run(what: str, *args: object, config: str = 'tiny', **kwargs: object) -> object:
        options = {
            'experiment_name': f'{tmp_path.name}_{next(names)}',
            # Merging takes `_delete_` out.
            **copy.deepcopy(kwargs.pop('cfg_options', {})),
        }
        function = {'train': train, 'evaluate': evaluate}[what]
        return function(TRAININGS / f'{config}_config.py', *args, cfg_options=options, **kwargs)

    return run
