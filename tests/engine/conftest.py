"""Runs of the small models beside this file, inside the test's process."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from mmvttt.engine.runner import evaluate, train

HERE = Path(__file__).parent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`run('train' or 'evaluate', *args, config='tiny', **kwargs)` in a folder of its own.

    Runs within one second would share mmengine's logs, were it not for their names.
    """
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(tmp_path)
    names = iter(range(100))

    def run(what: str, *args: object, config: str = 'tiny', **kwargs: object) -> object:
        options = {
            'experiment_name': f'{tmp_path.name}_{next(names)}',
            # Merging takes `_delete_` out.
            **copy.deepcopy(kwargs.pop('cfg_options', {})),
        }
        function = {'train': train, 'evaluate': evaluate}[what]
        return function(HERE / f'{config}_config.py', *args, cfg_options=options, **kwargs)

    return run
