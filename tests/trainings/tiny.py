"""A model, a data set and a metric of mmengine's own scope that train in milliseconds."""

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from torch import nn


@DATASETS.register_module(force=True)
class TinyData(BaseDataset):
    """Points on a line through the origin, in 16 samples."""

    def load_data_list(self) -> list[dict]:
        return [{'x': float(i) / 16} for i in range(16)]

    def prepare_data(self, idx: int) -> dict:
        x = torch.full((3,), self.get_data_info(idx)['x'])
        return {'x': x, 'y': 2 * x.sum(), 'index': idx}


class Regression(BaseModel):
    """Learns `y`, one number of each sample; remembers which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor, mode: str) -> object:
        out = self.net(x).float()[:, 0]
        if mode != 'loss':
            return [{'error': float((o - t) ** 2)} for o, t in zip(out, y, strict=True)]
        self.seen += index.tolist()
        return {'loss': ((out - y) ** 2).mean()}


@MODELS.register_module(force=True)
class TinyModel(Regression):
    """A normalised linear map; remembers what type it has computed in."""

    def __init__(self, norm: str = 'SyncBatchNorm') -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = getattr(nn, norm)(4)
        self.head = nn.Linear(4, 1)
        self.dtypes: set[torch.dtype] = set()

    def net(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.dtypes.add(hidden.dtype)
        return self.head(self.norm(hidden))


@METRICS.register_module(force=True)
class TinyError(BaseMetric):
    """Mean squared error, as a number of NumPy's, such as scores of mmseg."""

    def process(self, data_batch: object, data_samples: list[dict]) -> None:
        self.results += data_samples

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        return {'mse': np.mean([r['error'] for r in results])}
