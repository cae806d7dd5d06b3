"""Boxes, masks and label maps without the toolboxes' loops, compared with their predictions."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hub import get_config
from torch import Tensor, nn

from mmvttt.by_name import find_model
from mmvttt.deploy.runtime import OnnxFile, open_exported
from mmvttt.errors import UsageError
from mmvttt.openmmlab.apis import export
from mmvttt.openmmlab.apis.export import _match, export_model, exportable, predictor
from mmvttt.openmmlab.apis.predictor import Predictor, open_model
from mmvttt.openmmlab.export import file_model
from mmvttt.openmmlab.export.networks import as_outputs, samples_of

from ..configs.reduced import THIN, build, reduce_model, reduced, save_random

SIZE = (96, 128)


def mask_rcnn() -> Config:
    """Mask R-CNN with thin layers; all scores pass."""
    cfg = reduce_model(get_config('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'))
    model = cfg.model
    model.roi_head.bbox_head.num_classes = 3
    model.roi_head.mask_head.update(conv_out_channels=16, num_convs=1, num_classes=3)
    model.test_cfg.rpn.update(nms_pre=100, max_per_img=60)
    model.test_cfg.rcnn.update(score_thr=0.24, max_per_img=30)
    return cfg


def dino() -> Config:
    cfg = reduce_model(get_config('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'))
    cfg.model.bbox_head.num_classes = 3
    cfg.model.test_cfg.max_per_img = 30
    return cfg


def built(cfg: Config) -> nn.Module:
    model = build(cfg)
    model.init_weights()
    return model.eval()


@pytest.mark.parametrize('make', [mask_rcnn, dino])
def test_detections_are_mmdet_s(make: Any) -> None:
    model = built(make())
    network, image = predictor(model), torch.randn(1, 3, *SIZE)
    with torch.no_grad():
        outputs = network(image)
        sample = model.predict(image, samples_of(image), rescale=False)[0]
    expected = as_outputs(sample.pred_instances)
    assert len(network.names) == len(outputs) == len(expected)
    assert len(expected[0]) >= 5
    assert [x.dtype for x in outputs] == [x.dtype for x in expected]
    for a, b in zip(outputs, expected, strict=True):
        # fp32: boxes moved apart for the suppression, masks interpolated by products.
        torch.testing.assert_close(a.float(), b.float(), atol=1e-4, rtol=0)
    if len(outputs) == 3:
        assert outputs[2].any()


def test_regions_of_several_levels_keep_their_order() -> None:
    model = built(mask_rcnn())
    features = model.extract_feat(torch.randn(1, 3, *SIZE))
    sides = torch.tensor([300.0, 8, 120, 10, 500, 130])
    regions = torch.stack([0 * sides, 0 * sides, 0 * sides, sides, sides], 1)
    extractor = model.roi_head.bbox_roi_extractor
    assert len(set(extractor.map_roi_levels(regions, 4).tolist())) >= 3
    expected = extractor(features[: extractor.num_inputs], regions)
    torch.testing.assert_close(predictor(model)._pool('bbox', features, regions), expected)


def test_counterparts_of_boxes_are_found_in_any_order() -> None:
    dets = torch.tensor([[0, 0, 10, 10, 0.9], [0, 0, 10, 10, 0.5], [5, 5, 20, 20, 0.4]])
    labels = torch.tensor([1, 2, 1])
    masks = torch.ones(3, 20, 20, dtype=torch.bool)
    order, moved = torch.tensor([2, 0, 1]), dets.clone()
    moved[2, 0] += 0.25
    text, pixels, good = _match((dets, labels, masks), (moved[order], labels[order], masks[order]))
    assert good
    assert pixels == 0.25
    assert text.startswith('3 of 3 boxes')
    # Another label, a box that went away, a box that moved, another mask.
    assert not _match((dets, labels), (dets, torch.tensor([1, 1, 1])))[2]
    assert not _match((dets, labels), (dets[:2], labels[:2]))[2]
    moved[2, 0] += 1
    assert not _match((dets, labels), (moved, labels))[2]
    other = masks.clone()
    other[0, :5] = False
    assert not _match((dets, labels, masks), (dets, labels, other))[2]
    assert _match((dets[:0], labels[:0]), (dets[:0], labels[:0]))[0].startswith('no boxes')


def test_what_cannot_be_predicted_is_said(tmp_path: Path) -> None:
    soft = mask_rcnn()
    soft.model.test_cfg.rcnn.nms = dict(type='soft_nms', iou_threshold=0.5)
    cascade = built(mask_rcnn())
    cascade.roi_head.bbox_head = nn.ModuleList([cascade.roi_head.bbox_head])
    for model in (built(soft), cascade, nn.Linear(1, 1)):
        with pytest.raises(UsageError):
            predictor(model)
    classifier = find_model('cifar10_vittt_nano')
    with pytest.raises(UsageError, match='onnx'):
        next(export_model(classifier, None, tmp_path / 'm.pt2', predictions=True))
    (tmp_path / 'm.onnx').write_bytes(b'no graph')
    pytest.importorskip('onnxruntime')
    with pytest.raises(UsageError):
        OnnxFile(tmp_path / 'm.onnx')


class Eager(nn.Module):
    """A file in the place of an `OnnxFile`, computed by torch."""

    def __init__(self, network: nn.Module, size: tuple[int, int] | None) -> None:
        super().__init__()
        self.network, self.size, self.path = network, size, 'file.onnx'
        self.notes: dict[str, str] = {}
        self.names = getattr(network, 'names', ('output',))

    @torch.no_grad()
    def forward(self, image: Tensor) -> Any:
        assert self.size in (None, tuple(image.shape[2:]))
        outputs = self.network(image)
        return [outputs] if isinstance(outputs, Tensor) else outputs


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (height, width, 3)).astype(np.uint8)


def same_boxes(cfg: Config, weights: Path, image: np.ndarray) -> Predictor:
    """Checks that model and file see the same boxes; returns the predictor of the file."""
    predictors = [open_model(cfg, weights, file=file) for file in (None, 'f')]
    model, file = (
        sorted((r['label'], *(round(r[k]) for k in ('x1', 'y1', 'x2', 'y2'))) for r in p.rows())
        for p in (predictor.predict(image, 0.0) for predictor in predictors)
    )
    assert len(model) >= 5
    assert model == file
    return predictors[1]


def test_a_file_predicts_in_place_of_a_detector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = mask_rcnn()
    cfg.test_pipeline[1].scale = (128, 96)
    cfg.test_dataloader.dataset.pipeline = cfg.test_pipeline
    cfg.model.data_preprocessor.pad_size_divisor = 32
    model = save_random(cfg, tmp_path / 'w.pth', 'abc')
    file = Eager(predictor(model), SIZE)
    monkeypatch.setattr(file_model, 'open_exported', lambda *_: file)
    # Twice the size of the file, so that nothing is padded and both see the same pixels.
    by_file = same_boxes(cfg, tmp_path / 'w.pth', image := noise(192, 256))
    # A portrait is padded with zeros, and its boxes stay within the photograph.
    prediction = by_file.predict(cv2.resize(image, (120, 240)), 0.0)
    boxes, masks = prediction.boxes, prediction.masks
    assert masks.shape == (len(boxes), 240, 120)
    assert boxes[:, 0::2].max() <= 120.01
    assert boxes[:, 1::2].max() <= 240.01
    assert boxes[:, 3].max() > 96
    file.names = ('output',)
    with pytest.raises(UsageError):
        open_model(cfg, tmp_path / 'w.pth', file='f')


def segmentor() -> Config:
    cfg = get_config('mmseg::fcn/fcn_r50-d8_4xb4-20k_voc12aug-512x512.py')
    cfg.model.backbone.update(THIN, type='ResNetV1c', norm_cfg=dict(type='BN'))
    head = dict(in_channels=64, channels=16, num_classes=4, norm_cfg=dict(type='BN'))
    cfg.model.decode_head.update(head)
    cfg.model.auxiliary_head = None
    cfg.model.pretrained = None
    cfg.test_pipeline[1].scale = (128, 96)
    cfg.test_dataloader.dataset.pipeline = cfg.test_pipeline
    return cfg


def padded_segmentor() -> Config:
    cfg = segmentor()
    cfg.test_pipeline[1].scale = (120, 90)
    cfg.model.data_preprocessor.test_cfg = dict(size_divisor=64)
    return cfg


def classifier() -> Config:
    cfg = reduced('vit3_t_in1k')
    cfg.model.head.num_classes = cfg.model.data_preprocessor.num_classes = 4
    return cfg


def described(cfg: Config, make: Any, size: tuple[int, int] | None, folder: Path) -> list[dict]:
    """Names and shares or scores, as the model says them and as a file of `make` does."""
    model = save_random(cfg, folder / 'w.pth', 'abcd')
    image = noise(192, 256)
    said = []
    for path in (None, 'file.onnx'):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_model, 'open_exported', lambda *_: Eager(make(model), size))
            prediction = open_model(cfg, folder / 'w.pth', file=path).predict(image[..., ::-1])
        said.append(dict(map(dict.values, prediction.rows())))
    return said


@pytest.mark.parametrize(
    ('make', 'of', 'size', 'percent'),
    [
        (segmentor, exportable, SIZE, 0),
        (segmentor, exportable, None, 0),
        # mmseg enlarges logits, the tool labels: percent along the edges of regions.
        (segmentor, predictor, SIZE, 3),
        (padded_segmentor, exportable, None, 0),
        # The file sees a larger image.
        (padded_segmentor, exportable, SIZE, 1),
        (classifier, exportable, None, 0),
    ],
)
def test_a_file_predicts_in_place_of_a_model(
    make: Any, of: Any, size: Any, percent: float, tmp_path: Path
) -> None:
    expected, by_file = described(make(), of, size, tmp_path)
    assert len(by_file) > 1
    assert by_file == pytest.approx(expected, abs=percent / 100 + 5e-4, rel=0)


def test_a_pipeline_that_cannot_be_fitted_to_a_file(tmp_path: Path) -> None:
    cfg = segmentor()
    cfg.test_pipeline[1].type = 'ResizeShortestEdge'
    cfg.test_pipeline[1].pop('keep_ratio')
    cfg.test_pipeline[1].update(scale=192, max_size=256)
    with pytest.raises(UsageError):
        described(cfg, exportable, SIZE, tmp_path)


@pytest.mark.stress
@pytest.mark.parametrize('suffix', ['.onnx', '.xml'])
@pytest.mark.parametrize('make', [mask_rcnn, dino])
def test_detections_out_of_a_file(make: Any, suffix: str, tmp_path: Path) -> None:
    for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
        pytest.importorskip(package)
    cfg = make()
    cfg.dump(tmp_path / 'config.py')
    torch.save(built(cfg).state_dict(), tmp_path / 'w.pth')
    cv2.imwrite(str(tmp_path / 'noise.png'), noise(90, 130))
    out = tmp_path / f'boxes{suffix}'
    (comparison,) = export_model(
        find_model(str(tmp_path / 'config.py')),
        tmp_path / 'w.pth',
        out,
        predictions=True,
        size=SIZE,
        images=[tmp_path / 'noise.png'],
    )
    assert 'boxes are the same' in comparison.text
    file = open_exported(out)
    assert file.size == SIZE
    assert file.names[:2] == ('dets', 'labels')
    # Nothing to be seen, with and without masks.
    dets, labels, *masks = file(torch.zeros(1, 3, *SIZE))
    assert dets.shape == (len(labels), 5)
    assert all(m.shape == (len(labels), *SIZE) for m in masks)
    with pytest.raises(UsageError):
        file(torch.zeros(1, 3, 64, 64))


@pytest.mark.stress
def test_the_label_map_of_a_mask2former_out_of_onnx(tmp_path: Path) -> None:
    for package in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(package)
    cfg = reduce_model(get_config('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'))
    cfg.dump(tmp_path / 'config.py')
    out = tmp_path / 'labels.onnx'
    named = find_model(str(tmp_path / 'config.py'))
    (comparison,) = export_model(named, None, out, predictions=True, size=SIZE)
    assert comparison.error < 1e-2
    labels, scores = OnnxFile(out)(torch.rand(1, 3, *SIZE))
    assert labels.shape == scores.shape == (1, *SIZE)
    assert labels.dtype == torch.int64


def test_a_file_of_another_size_than_the_padding_predicts_as_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of 90×120 are padded to 96×128, in the model and for the file."""
    cfg = mask_rcnn()
    cfg.test_pipeline[1].scale = (120, 90)
    cfg.test_dataloader.dataset.pipeline = cfg.test_pipeline
    cfg.dump(tmp_path / 'config.py')
    model = save_random(cfg, tmp_path / 'w.pth', 'abc')
    written: dict[str, Any] = {}

    def write(named: Any, network: Any, *args: Any, **options: Any) -> Any:
        written.update(options['about'], network=network, size=args[2])
        return iter(())

    monkeypatch.setattr(export, 'write_model', write)
    named = find_model(str(tmp_path / 'config.py'))
    list(export_model(named, tmp_path / 'w.pth', 'a.onnx', predictions=True))
    assert written['size'] == SIZE
    assert json.loads(written['picture_size']) == [90, 120]
    assert json.loads(written['classes']) == ['a', 'b', 'c']
    written['network'].model.load_state_dict(model.state_dict())
    file = Eager(written['network'], SIZE)
    file.notes = {key: written[key] for key in ('picture_size', 'classes')}
    monkeypatch.setattr(file_model, 'open_exported', lambda *_: file)
    same_boxes(cfg, tmp_path / 'w.pth', noise(180, 240))
    # Halves are rounded up: 45 of 90 becomes 23 of 45.
    resized = file_model.ResizeInto(dict(type='mmdet.Resize'), (90, 45))(
        dict(img=np.zeros((91, 90, 3), np.uint8))
    )
    assert resized['img'].shape[:2] == (46, 45)
