"""The memories of a launch: tensors with their bounds, shared memory with races and first reads."""

from collections.abc import Iterable

import numpy as np
import torch


class Fault(Exception):
    """An access that the kernel must not make; the machine adds where."""


class GlobalMemory:
    """The storages of tensors at their own addresses; nothing else may be touched."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        segments: dict[int, tuple[int, str]] = {}
        for name, tensor in tensors:
            storage = tensor.untyped_storage()
            known = segments.get(storage.data_ptr(), (0, ''))[1]
            names = f'{known}, {name}' if known else name
            segments[storage.data_ptr()] = (storage.nbytes(), names)
        self._starts = np.array(sorted(segments), np.uint64)
        self._sizes = np.array([segments[int(a)][0] for a in self._starts], np.uint64)
        self._names = [segments[int(a)][1] for a in self._starts]
        self._views = [_bytes_at(int(a), segments[int(a)][0]) for a in self._starts]

    def _groups(self, addresses: np.ndarray, size: int):
        if (addresses % np.uint64(size) != 0).any():
            raise Fault(f'a global access of {size} bytes is not aligned to them')
        place = np.searchsorted(self._starts, addresses, side='right') - 1
        for i in np.unique(place):
            lanes = place == i
            offsets = addresses[lanes] - self._starts[i] if i >= 0 else addresses[lanes]
            beyond = i < 0 or (offsets + np.uint64(size) > self._sizes[i])
            if np.any(beyond):
                near = (
                    'below all tensors'
                    if i < 0
                    else f'{int(offsets.max())} bytes into {self._names[i]}, which has '
                    f'{int(self._sizes[i])}'
                )
                raise Fault(f'a global access out of bounds: {near}')
            yield lanes, self._views[i], offsets.astype(np.int64)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes `(lanes, size)`."""
        found = np.empty((len(addresses), size), np.uint8)
        for lanes, view, offsets in self._groups(addresses, size):
            found[lanes] = view[offsets[:, None] + np.arange(size)]
        return found

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        for lanes, view, offsets in self._groups(addresses, values.shape[1]):
            view[offsets[:, None] + np.arange(values.shape[1])] = values[lanes]


def _bytes_at(address: int, size: int) -> np.ndarray:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class SharedMemory:
    """Shared memory of several programs, one after the other; an epoch lasts until a barrier.

    In an epoch nothing orders the warps of a program. Bytes that one warp wrote may be read by the
    same warp only, and bytes that one read may be written by it only. Warps that write the same
    value to the same place are no race: that is how Triton replicates.

    Threads write by the generic proxy and WGMMA reads by the asynchronous one, which sees what was
    written before a proxy fence.
    """

    def __init__(self, programs: int, size: int) -> None:
        self.programs, self.size = programs, size
        total = programs * size
        self.data = np.full(total, 0xFF, np.uint8)
        self._written = np.zeros(total, bool)
        self._unfenced = np.zeros(total, bool)
        self._write_epoch, self._read_epoch = (np.zeros(total, np.int32) for _ in range(2))
        # Bit w: warp w did it in that epoch.
        self._writers, self._readers = (np.zeros(total, np.uint32) for _ in range(2))
        self.epoch = 1

    def part(self, kept: np.ndarray) -> 'SharedMemory':
        """The memory of some of the programs alone."""
        part = SharedMemory(0, self.size)
        part.programs, part.epoch = int(kept.sum()), self.epoch
        bits = ('_written', '_unfenced')
        for name in ('data', *bits, '_write_epoch', '_read_epoch', '_writers', '_readers'):
            rows = getattr(self, name).reshape(self.programs, self.size)
            setattr(part, name, rows[kept].ravel())
        return part

    def _places(self, addresses: np.ndarray, programs: np.ndarray, size: int) -> np.ndarray:
        if (addresses < 0).any() or (addresses + size > self.size).any():
            raise Fault(
                f'a shared access out of bounds: byte {int(addresses.max())} of {self.size}'
            )
        if (addresses % size != 0).any():
            raise Fault(f'a shared access of {size} bytes is not aligned to them')
        return (programs * self.size + addresses)[:, None] + np.arange(size)

    def load(
        self,
        addresses: np.ndarray,
        programs: np.ndarray,
        warps: np.ndarray,
        size: int,
        asynchronous: bool = False,
    ) -> np.ndarray:
        """Bytes `(lanes, size)` for lanes of these programs and warps; by which proxy."""
        places = self._places(addresses, programs, size)
        if asynchronous and self._unfenced[places].any():
            raise Fault('WGMMA reads what threads wrote, with no fence.proxy.async between')
        bits = np.uint32(1) << warps.astype(np.uint32)[:, None]
        if not self._written[places].all():
            raise Fault('shared memory is read before anything was written there')
        fresh = self._write_epoch[places] == self.epoch
        if fresh.any() and (fresh & (self._writers[places] & bits == 0)).any():
            raise Fault('a race: a warp reads what another wrote, with no barrier between')
        self._mark(self._read_epoch, self._readers, places, bits)
        return self.data[places]

    def store(
        self, addresses: np.ndarray, programs: np.ndarray, warps: np.ndarray, values: np.ndarray
    ) -> None:
        places = self._places(addresses, programs, values.shape[1])
        bits = np.uint32(1) << warps.astype(np.uint32)[:, None]
        rewritten = self._write_epoch[places] == self.epoch
        same = rewritten & (self.data[places] == values)
        others = self._writers[places] & ~bits != 0
        if (rewritten & others & ~same).any():
            raise Fault('a race: two warps write different values, with no barrier between')
        read = (self._read_epoch[places] == self.epoch) & (self._readers[places] & ~bits != 0)
        if (read & ~same).any():
            raise Fault('a race: a warp overwrites what another reads, with no barrier between')
        self.data[places] = values
        if (self.data[places] != values).any():
            # Also in a warp, where one thread wins, and which one is undefined.
            raise Fault('a race: two threads write different values at once')
        self._written[places] = True
        self._unfenced[places] = True
        self._mark(self._write_epoch, self._writers, places, bits)

    def arrive(self, addresses: np.ndarray, programs: np.ndarray, size: int) -> None:
        """Ends a copy that was written before: a fence on its way did not show it to WGMMA."""
        self._unfenced[self._places(addresses, programs, size)] = True

    def fence(self) -> None:
        """Shows the asynchronous proxy all that was written."""
        self._unfenced[:] = False

    def _mark(
        self, epochs: np.ndarray, masks: np.ndarray, places: np.ndarray, bits: np.ndarray
    ) -> None:
        masks[places[epochs[places] != self.epoch]] = 0
        epochs[places] = self.epoch
        np.bitwise_or.at(masks, places, np.broadcast_to(bits, places.shape))
