"""scikit-learn's handwritten digits for the toolboxes' pipelines: a classifier in a minute."""

from collections.abc import Mapping
from typing import Any, ClassVar

from mmengine.dataset import BaseDataset

from ..registry import DATASETS
from .latents import TinyDigits


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
