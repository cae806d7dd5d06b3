"""Faster inference on a GPU at one size of images: a CUDA graph, recorded once and replayed.

With few images the host needs more time to launch the kernels of a model than the GPU to run them.
A graph contains all launches and issues them at once.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import UsageError

# Runs before recording, in which kernels are compiled and cuDNN selects its own.
_WARM_UP = 3


class Replayed(nn.Module):
    """Runs a network of images `(B, C, H, W)` by a CUDA graph, for inference.

    The first call records the graph. Later ones take the same `(C, H, W)` and as many images or
    fewer. Parameters may change in place (`load_state_dict`), not move. Mixed precision belongs
    inside, or around every call alike. Threads take turns. A copy, also a shallow or a pickled one,
    records a graph of its own.

    Args:
        network: Takes only images, like backbones and timm's classifiers. Its outputs have a batch.

    Raises:
        UsageError: At a call with images on a CPU, with gradients, or of another size, dtype or
            device than the first.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._forget()

    def _forget(self) -> None:
        self._graph: Any = None
        self._images: Any = None
        self._output: Any = None
        # Images and outputs of one call at a time are in the graph's memory.
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        graph = ('_graph', '_images', '_output', '_lock', '_done')
        return {k: v for k, v in super().__getstate__().items() if k not in graph}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def forward(self, images: Tensor) -> Any:
        """The network's output for these images, in tensors of its own."""
        if torch.is_grad_enabled():
            raise UsageError(
                'a CUDA graph is for inference: call the model under torch.no_grad(), or leave '
                'cuda_graph out',
                'cuda_graph',
            )
        with self._lock:
            if self._graph is None:
                # A graph must not keep tensors of inference_mode.
                with torch.inference_mode(False), torch.no_grad():
                    self._record(images)
            return self._replay(images)

    def _replay(self, images: Tensor) -> Any:
        first, batch = self._images, len(images)
        if _kind(images) != _kind(first) or batch > len(first):
            raise UsageError(
                f'the CUDA graph was recorded for at most {len(first)} images {_about(first)}, and '
                f'these are {batch} of {_about(images)}; give all images one size (in the pipeline '
                'of the data, or by padding), or leave cuda_graph out',
                'cuda_graph',
            )
        if self._done is not None:
            # The last call may have been on another stream.
            self._done.wait()
        first[:batch].copy_(images)
        self._graph.replay()
        outputs = tree_map(
            lambda x: x[:batch].clone() if isinstance(x, Tensor) else x, self._output
        )
        if images.is_cuda:
            self._done = torch.cuda.current_stream(images.device).record_event()
        return outputs

    def _record(self, images: Tensor) -> None:
        if images.device.type != 'cuda':
            raise UsageError(
                f'a CUDA graph needs images on a GPU, these are on {str(images.device)!r}; leave '
                'cuda_graph out',
                'cuda_graph',
            )
        self._images = torch.empty_like(images).copy_(images)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self.network(self._images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Weights cast by autocast must belong to the graph, or they are freed before it is
        # replayed.
        torch.clear_autocast_cache()
        with torch.cuda.graph(graph):
            self._output = self.network(self._images)
        torch.clear_autocast_cache()
        self._graph = graph


def _kind(images: Tensor) -> tuple[Any, ...]:
    return images.shape[1:], images.dtype, images.device


def _about(images: Tensor) -> str:
    return f'{" × ".join(map(str, images.shape[1:]))} in {images.dtype} on {images.device}'
