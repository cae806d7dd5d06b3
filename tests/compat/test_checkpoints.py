"""What `torch.load(weights_only=True)` reads after the mend, and what it still refuses."""

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub

from mmvttt.compat import checkpoints


def through_file(content: object) -> object:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_logs_of_a_run() -> None:
    hub = MessageHub.get_instance('test_checkpoints')
    for value in (1.0, 2.0, 6.0):
        hub.update_scalar('train/loss', value)
    hub.update_info('best', np.float64(0.25))
    hub.update_info('palette', np.arange(6, dtype=np.uint8).reshape(2, 3))
    state = through_file(hub.state_dict())
    loss = state['log_scalars']['train/loss']
    assert isinstance(loss, HistoryBuffer)
    assert loss.data[0].tolist() == [1.0, 2.0, 6.0]
    assert (loss.mean(), loss.max(), loss.min(), loss.current()) == (3.0, 6.0, 1.0, 6.0)
    assert loss.statistics('mean') == 3.0
    assert state['runtime_info']['best'] == 0.25
    assert state['runtime_info']['palette'].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize('dtype', checkpoints._DTYPES)
def test_arrays_and_scalars(dtype: str) -> None:
    array = np.array([0, 1], dtype=dtype)
    assert through_file(array).dtype == array.dtype
    assert through_file(array[1]) == array[1]


def test_names_of_both_numpy_generations() -> None:
    names = {entry[1] for entry in checkpoints.allowed() if isinstance(entry, tuple)}
    assert {
        'numpy.core.multiarray._reconstruct',
        'numpy._core.multiarray._reconstruct',
        'numpy.core.multiarray.scalar',
        'numpy._core.multiarray.scalar',
    } <= names


class Reduced:
    """Pickles as the call of a function."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize(
    ('owner', 'name'),
    [(HistoryBuffer, '__init__'), (HistoryBuffer, 'update'), (np.ndarray, 'tofile'), (dict, 'get')],
)
def test_getattr_reaches_the_four_statistics_only(owner: type, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError):
        through_file(Reduced(getattr, owner, name))


def test_functions_are_not_called(tmp_path: Path) -> None:
    for function in (os.mkdir, os.system, eval):
        with pytest.raises(pickle.UnpicklingError):
            through_file(Reduced(function, f'mkdir {tmp_path}/ran'))
    assert not any(tmp_path.iterdir())


def test_the_fork_s_loader_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkpoints.mmengine_checkpoint
    monkeypatch.delattr(module, '_safe_torch_load', raising=False)
    assert checkpoints.load_forks_safely() == 'this mmengine has no such fallback'
    monkeypatch.setattr(module, '_safe_torch_load', torch.load, raising=False)
    assert checkpoints.load_forks_safely() is None
    torch.save(Reduced(os.mkdir, f'{tmp_path}/ran'), tmp_path / 'a.pth')
    with pytest.raises(pickle.UnpicklingError):
        module._safe_torch_load(tmp_path / 'a.pth', weights_only=False)
    assert not (tmp_path / 'ran').exists()
