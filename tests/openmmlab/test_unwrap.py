"""The model inside of its wrappers, as options and checks of checkpoints take it."""

from types import SimpleNamespace

import pytest
from mmengine.model import BaseTTAModel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mmvttt.openmmlab.reliability.fit import require_weights
from mmvttt.openmmlab.unwrap import bare_model


class Wrapper(nn.ModuleDict):
    """As DDP: without a process group."""


class Average(BaseTTAModel):
    def merge_preds(self, data_samples_list: list) -> list:
        return data_samples_list


def test_augmented_tests_on_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_WRAPPERS._module_dict, 'Wrapper', Wrapper)
    model = nn.Linear(2, 3)
    model.test_step = lambda data: None
    wrapped = Wrapper(dict(module=Average(model)))
    assert bare_model(model) is bare_model(Average(model)) is bare_model(wrapped) is model
    require_weights(SimpleNamespace(model=wrapped), model.state_dict(), 'a.pth', whole=True)
