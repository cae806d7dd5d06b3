"""The model itself, inside of what wraps it for several processes or augmented tests."""

from typing import Any

from mmengine.model import BaseTTAModel, is_model_wrapper


def bare_model(model: Any) -> Any:
    """A model without its wrappers: DDP, FSDP, test-time augmentation, one around the other."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model
