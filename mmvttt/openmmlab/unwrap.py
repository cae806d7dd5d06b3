"""The model itself, inside of what wraps it for several processes or augmented tests."""

from typing import Any

from mmengine.model import BaseTTAModel, is_model_wrapper


def is_wrapped(model: Any) -> bool:
    """Whether a model is DDP, FSDP or test-time augmentation around another."""
    return is_model_wrapper(model) or isinstance(model, BaseTTAModel)


def bare_model(model: Any) -> Any:
    """A model without its wrappers, one around the other."""
    while is_wrapped(model):
        model = model.module
    return model
