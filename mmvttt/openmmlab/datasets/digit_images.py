"""scikit-learn's handwritten digits, as latents and for the toolboxes' pipelines."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from torch import Tensor
from torch.utils.data import Dataset

from mmvttt.arguments import check_choice

from ..registry import DATASETS


@DATASETS.register_module()
class TinyDigits(Dataset):
    """scikit-learn's 1797 handwritten digits, 8×8 and one channel in [−1, 1], as a set of latents.

    Args:
        split: 'train' (1437 images), or 'test' (the other 360).

    Raises:
        ValueError: There is no such split.
    """

    def __init__(self, split: str = 'train') -> None:
        check_choice('split', split, ('train', 'test'))
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        chosen = order[:1437] if split == 'train' else order[1437:]
        self.metainfo = dict(classes=[str(digit) for digit in range(10)])
        images = torch.from_numpy(digits.images[chosen]).float()
        self.images = images[:, None] / 8 - 1
        self.labels = torch.from_numpy(digits.target[chosen]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`latents`, `(1, 8, 8)`, and `class_labels`."""
        return dict(latents=self.images[index], class_labels=self.labels[index])


@DATASETS.register_module()
class DigitImages(BaseDataset):
    """scikit-learn's 1797 digits as images `(8, 8, 1)` uint8, `img` and `gt_label` of a pipeline.

    Args:
        split: 'train' (1437 images), or 'test' (the other 360).
        options: Options of mmengine's `BaseDataset`, e.g. `pipeline`.
    """

    METAINFO: ClassVar[Mapping[str, Any]] = dict(classes=tuple('0123456789'))

    def __init__(self, split: str = 'train', **options: Any) -> None:
        self.split = split
        super().__init__(**options)

    def load_data_list(self) -> list[dict]:
        """An entry for each image, with which a pipeline needs no loading step."""
        digits = TinyDigits(self.split)
        images = ((digits.images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        return [
            dict(img=image, gt_label=int(label), ori_shape=(8, 8), img_shape=(8, 8))
            for image, label in zip(images, digits.labels, strict=True)
        ]
