"""Contents of a checkpoint, as torch's weights-only reader sees them: numbers, no functions."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

pytest.importorskip('mmengine')
from mmengine.logging import HistoryBuffer, MessageHub

from mmvttt.checkpoints import allow_list
from mmvttt.checkpoints.read import read_content
from mmvttt.errors import CheckpointError
from mmvttt.openmmlab.compat.checkpoints import _with_history

from .pickles import New, Reduced, saved


def through_file(content: object) -> object:
    with allow_list.allowing():
        return torch.load(io.BytesIO(saved(content)), weights_only=True)


RECONSTRUCT = np.zeros(0).__reduce__()[0]
SCALAR = np.float64(0).__reduce__()[0]
DOUBLE = np.dtype('f8')


def array(*state: object, kind: type = np.ndarray) -> Reduced:
    return Reduced(RECONSTRUCT, kind, (0,), b'b', state=state)


def test_logs_of_a_run() -> None:
    hub = MessageHub.get_instance('test_checkpoints')
    for value in (1.0, 2.0, 6.0):
        hub.update_scalar('train/loss', value)
    hub.update_info('best', np.float64(0.25))
    hub.update_info('palette', np.arange(6, dtype=np.uint8).reshape(2, 3))
    state = through_file({'message_hub': hub.state_dict()})
    # Without mmengine: the numbers alone.
    curve = state['message_hub']['log_scalars']['train/loss']
    assert type(curve) is allow_list.LogCurve
    assert curve.values.tolist() == [1.0, 2.0, 6.0]
    assert curve.counts.tolist() == [1, 1, 1]
    # The door makes mmengine's objects of them.
    state = _with_history(state)['message_hub']
    loss = state['log_scalars']['train/loss']
    assert type(loss) is HistoryBuffer
    assert [type(part) for part in loss.data] == [np.ndarray] * 2
    assert loss.data[0].tolist() == [1.0, 2.0, 6.0]
    assert (loss.mean(), loss.max(), loss.min(), loss.current()) == (3.0, 6.0, 1.0, 6.0)
    assert loss.statistics('mean') == 3.0
    assert loss.max_length == hub.get_scalar('train/loss').max_length
    assert state['runtime_info']['best'] == 0.25
    assert state['runtime_info']['palette'].tolist() == [[0, 1, 2], [3, 4, 5]]
    # Once more: what was read can be saved and read.
    again = through_file(state)
    assert again['log_scalars']['train/loss'].values.tolist() == [1.0, 2.0, 6.0]


@pytest.mark.parametrize('code', allow_list._CODES)
def test_arrays_and_scalars(code: str) -> None:
    dtype = np.dtype(code)
    numbers = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    for expected in (numbers, np.asfortranarray(numbers), numbers[:0], numbers[0, 0]):
        loaded = through_file(expected)
        assert loaded.dtype == dtype
        assert loaded.shape == expected.shape
        assert np.array_equal(loaded, expected)
        assert loaded.flags.f_contiguous == expected.flags.f_contiguous
    assert through_file(dtype) == dtype


def test_an_array_behaves_and_is_saved_as_numpy_s() -> None:
    expected = np.arange(6.0).reshape(2, 3)
    loaded = through_file(expected)
    assert pickle.dumps(loaded) == pickle.dumps(expected)
    for result in (loaded + 1, loaded.mean(0), np.append(loaded, 1)):
        assert type(result) is np.ndarray
    assert type(loaded.sum()) is np.float64


def test_files_of_both_versions_of_numpy_are_read() -> None:
    names = {name for _, name in allow_list.allowed()}
    assert {f'numpy.{c}.multiarray.scalar' for c in ('core', '_core')} < names


@pytest.mark.parametrize(
    'attack',
    [
        # Arrays of Python objects out of any bytes: they crash, or worse, where they are touched.
        Reduced(np.ndarray, (1,), 'O', bytearray(b'A' * 8)),
        New(np.ndarray, (1,), 'O', bytearray(b'A' * 8)),
        array(1, (1,), np.dtype('O'), False, [print]),
        np.array([{}, None], object),
        np.array(['text']),
        # Types with a layout of their own.
        Reduced(np.dtype, [('a', 'O')]),
        Reduced(type(DOUBLE)),
        Reduced(np.dtype, 'f8,O'),
        # Contents and sizes that do not fit.
        array(1, (2,), DOUBLE, False, b'A' * 8),
        array(1, (-1, -1), DOUBLE, False, b'A' * 8),
        array(1, (1,), DOUBLE, False, [1.0]),
        array(1, (1,), 'f8', False, b'A' * 8),
        array((1,), DOUBLE, False, b'A' * 8),
        array(1, (1,), DOUBLE, False, b'A' * 8, kind=dict),
        Reduced(SCALAR, DOUBLE, b'A'),
        Reduced(RECONSTRUCT, np.memmap, (0,), b'b'),
        # Curves.
        Reduced(HistoryBuffer, [1], [1]),
        New(HistoryBuffer, state={'_log_history': [1]}),
        # Attributes.
        Reduced(getattr, HistoryBuffer, '__init__'),
        Reduced(getattr, np.ndarray, 'tofile'),
        Reduced(getattr, dict, 'get'),
        Reduced(bytes, 8),
    ],
)
def test_what_is_refused(attack: object) -> None:
    with pytest.raises(pickle.UnpicklingError):
        through_file(attack)


def test_a_second_state_of_an_array_is_refused() -> None:
    """NumPy would free the numbers, which a tensor may share by now."""
    loaded = through_file(np.ones(4))
    with pytest.raises(pickle.UnpicklingError):
        loaded.__setstate__((1, (4,), DOUBLE, False, bytes(32)))


def test_a_curve_brings_no_functions() -> None:
    """mmengine's own reader would call it in the place of the mean, in every log from then on."""
    state = {**vars(HistoryBuffer([1.0, 3.0], [1, 1]))}
    state['statistics_methods'] = {'mean': HistoryBuffer.max}
    before = dict(HistoryBuffer._statistics_methods)
    loaded = through_file(New(HistoryBuffer, state={**state, 'mean': set, 'other': set}))
    assert HistoryBuffer._statistics_methods == before
    assert set(vars(loaded)) == {'values', 'counts', 'max_length'}
    assert loaded.values.tolist() == [1.0, 3.0]


def test_the_user_s_own_list_does_no_harm() -> None:
    """Which of two entries of a name counts, torch leaves to chance."""
    # torch's list after the advice that people give each other.
    extra = [getattr, np.ndarray, np.dtype, RECONSTRUCT, SCALAR, HistoryBuffer, type(DOUBLE)]
    with torch.serialization.safe_globals([*extra, type(np.dtype('i8'))]):
        loaded = through_file(dict(curve=HistoryBuffer([1.0, 3.0], [1, 1]), a=np.arange(3)))
    curve = loaded['curve']
    values = curve.data[0] if isinstance(curve, HistoryBuffer) else curve.values
    assert values.tolist() == [1.0, 3.0]
    assert loaded['a'].tolist() == [0, 1, 2]


def archive(data: bytes, compression: int = zipfile.ZIP_STORED, times: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w', compression) as file:
        file.writestr('a/data.pkl', b'\x80\x02}.')
        file.writestr('a/data/0', data)
        file.filelist += [file.getinfo('a/data/0')] * times
    return buffer.getvalue()


@pytest.mark.parametrize(
    'file',
    [archive(bytes(10_000_000), zipfile.ZIP_DEFLATED), archive(bytes(100_000), times=10_000)],
    ids=['compressed', 'parts on one another'],
)
def test_what_asks_for_too_much_is_refused(file: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_content(io.BytesIO(file))


def test_nothing_stays_on_torch_s_list() -> None:
    before = {*torch.serialization.get_safe_globals()}
    assert read_content(io.BytesIO(saved({'a': 1}))) == {'a': 1}
    assert {*torch.serialization.get_safe_globals()} == before
