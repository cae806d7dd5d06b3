"""BatchNorm's means after two steps of two ranks, with the wrapper of H-ViT³'s ImageNet recipe."""

import sys
from pathlib import Path

import torch
from mmengine.dist import get_rank, init_dist
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn

from mmvttt.openmmlab.config import load_config


class Normed(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, inputs: Tensor, mode: str) -> dict[str, Tensor]:
        return dict(loss=self.norm(inputs).square().mean())


def main() -> None:
    init_dist('pytorch', backend='gloo')
    model = Normed()
    cfg = load_config('hvit3_s_in1k')
    wrapped = MODEL_WRAPPERS.build(cfg.model_wrapper_cfg, default_args=dict(module=model))
    optimizer = OptimWrapper(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        # Means 1 and 10 in the first step, 2 and 20 in the second.
        mean = (step + 1) * (1.0, 10.0)[get_rank()]
        wrapped.train_step(dict(inputs=torch.tensor([[mean - 1], [mean + 1]])), optimizer)
    torch.save(model.norm.running_mean, Path(sys.argv[1]) / f'{get_rank()}.pth')


if __name__ == '__main__':
    main()
