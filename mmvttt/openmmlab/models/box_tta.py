"""mmdet's test-time augmentation for detectors that find masks, too."""

from mmdet.models.test_time_augs import DetTTAModel
from mmdet.structures import DetDataSample

from ..registry import MODELS


@MODELS.register_module()
class BoxTTAModel(DetTTAModel):
    """A `DetTTAModel` that leaves out masks, which mmdet cannot merge, instead of failing."""

    def _merge_single_sample(self, data_samples: list[DetDataSample]) -> DetDataSample:
        for sample in data_samples:
            sample.pred_instances.pop('masks', None)
        return super()._merge_single_sample(data_samples)
