"""Parts of a model: what is inside of the wrappers of a training or a test, and its backbones."""

from typing import Any

from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import nn


def is_wrapped(model: Any) -> bool:
    """Whether a model is DDP, FSDP or test-time augmentation around another."""
    return is_model_wrapper(model) or isinstance(model, BaseTTAModel)


def bare_model(model: Any) -> Any:
    """A model without its wrappers, one around the other."""
    while is_wrapped(model):
        model = model.module
    return model


def backbones_of(model: nn.Module, method: str = 'forward') -> dict[str, nn.Module]:
    """Modules called `backbone` with a method, in no other such module, by their names."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f'{outer}.') for outer in outermost)
        if name.rpartition('.')[2] == 'backbone' and hasattr(module, method) and not inside:
            outermost[name] = module
    return outermost
