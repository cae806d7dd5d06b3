"""BatchNorm's means after two steps of two ranks, with H-ViT³'s ImageNet recipe and ddp.py."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from mmengine.config import Config
from mmengine.dist import get_rank, init_dist
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODEL_WRAPPERS
from torch import Tensor, nn

import mmvttt.openmmlab.engine  # noqa: F401

CONFIGS = Path(__file__).parents[2] / 'configs'


class Normed(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, inputs: Tensor, mode: str) -> dict[str, Tensor]:
        return dict(loss=self.norm(inputs).square().mean())


def main() -> None:
    init_dist('pytorch', backend='gloo')
    model = Normed()
    wrapper = Config.fromfile(CONFIGS / '_base_' / 'ddp.py').model_wrapper_cfg
    wrapped = MODEL_WRAPPERS.build(wrapper, default_args=dict(module=model))
    for hook in Config.fromfile(CONFIGS / 'hvit3_s_in1k.py').custom_hooks:
        if hook.type == 'mmvttt.BroadcastBuffersHook':
            HOOKS.build(hook).before_train(SimpleNamespace(model=wrapped))
    optimizer = OptimWrapper(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        # Means 1 and 10 in the first step, 2 and 20 in the second.
        mean = (step + 1) * (1.0, 10.0)[get_rank()]
        wrapped.train_step(dict(inputs=torch.tensor([[mean - 1], [mean + 1]])), optimizer)
    torch.save(model.norm.running_mean, Path(sys.argv[1]) / f'{get_rank()}.pth')


if __name__ == '__main__':
    main()
