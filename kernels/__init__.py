"""Ops of the Test-Time-Training backbones: PyTorch references, Triton and numba kernels.

With `backend=None` an op takes its Triton kernel on a GPU and its numba kernel on a CPU, where
there is one that can run, and its reference elsewhere. A backend that is given and cannot run
raises RuntimeError. Ops raise TypeError for a wrong type or dtype, ValueError for a wrong shape, an
empty map, mixed devices or an unknown option.

`python -m ttt_kernels` prints what can run here. Importing needs torch only.
"""

if __name__ == 'ttt_kernels':
    from ._backend import BACKENDS, available
    from ._op import decompositions
    from .causal_conv import causal_conv
    from .deform_attn import deform_attn
    from .ttt_dwconv import ttt_dwconv
    from .ttt_glu import ttt_glu
    from .ttt_linear import convolved_ttt_linear, ttt_linear
    from .ttt_mlp import ttt_mlp

    __all__ = [
        'BACKENDS',
        'available',
        'causal_conv',
        'convolved_ttt_linear',
        'decompositions',
        'deform_attn',
        'ttt_dwconv',
        'ttt_glu',
        'ttt_linear',
        'ttt_mlp',
    ]
else:

    def __getattr__(name: str) -> object:
        # transformers imports `kernels`, and finds this folder where its parent is on sys.path. A
        # second registration of the ops would leave the first ones with freed memory.
        raise AttributeError(f'{__file__} is the package ttt_kernels: import ttt_kernels')
