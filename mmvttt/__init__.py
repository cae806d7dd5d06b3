"""mmvttt: Test-Time-Training backbones for vision, linear in the number of patches.

The names below are imported when they are used. Importing the package has no side effects, except
that a program that has imported mmengine also gets `mmvttt.openmmlab`.
"""

import sys
from typing import TYPE_CHECKING

from .on_demand import OnDemand
from .version import __version__

if TYPE_CHECKING:
    from .by_name import finetune, load, plan
    from .models.adapters import ViTAdapter
    from .models.backbones import T5, HViT3, TimmViT, ViT3, Vittt
    from .models.generation import DiT3
    from .models.linearize import Linearization, linearize

__all__ = [
    'T5',
    'DiT3',
    'HViT3',
    'Linearization',
    'TimmViT',
    'ViT3',
    'ViTAdapter',
    'Vittt',
    '__version__',
    'finetune',
    'linearize',
    'load',
    'plan',
]
__getattr__ = OnDemand(
    __name__,
    by_name='finetune load plan',
    models='T5 HViT3 TimmViT ViT3 ViTAdapter Vittt',
    **{'models.generation': 'DiT3', 'models.linearize': 'Linearization linearize'},
).attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if 'mmengine' in sys.modules:
    # For `custom_imports=['mmvttt']`, and tools that import mmvttt without the start-up line.
    from . import openmmlab  # noqa: F401
