"""16 images of noise with 3 labels, for a classifier of mmpretrain."""

import torch
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from mmpretrain.structures import DataSample


@DATASETS.register_module(force=True)
class SmallImages(BaseDataset):
    """Sides that no patch divides."""

    def load_data_list(self) -> list[dict]:
        noise = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (16, 3, 31, 45), dtype=torch.uint8, generator=noise)
        return [{'image': image, 'index': i} for i, image in enumerate(images)]

    def prepare_data(self, idx: int) -> dict:
        info = self.get_data_info(idx)
        sample = DataSample().set_gt_label(idx % 3)
        return {'inputs': info['image'], 'data_samples': sample, 'index': idx}
