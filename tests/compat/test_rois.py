"""RoIs keep their pixels where features are in bf16 or fp16."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from mmvttt.compat import rois


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_mmdet_s_extractor_does_not_move_boxes(dtype: torch.dtype) -> None:
    module = importlib.import_module(rois.EXTRACTOR)
    extractor = module.SingleRoIExtractor(
        roi_layer=dict(type='RoIAlign', output_size=3, sampling_ratio=0),
        out_channels=1,
        featmap_strides=[4, 8],
    )
    # A ramp of one unit per pixel, in steps that both types hold exactly.
    features = tuple(
        torch.arange(0.0, 1024, stride).expand(1, 1, 16, -1).contiguous() for stride in (4, 8)
    )
    box = torch.tensor([[0.0, 801.0, 8.0, 825.0, 40.0]])
    full = extractor(features, box)
    # A bin's centre, half a pixel of stride 4 further left.
    torch.testing.assert_close(full[0, 0, 0], torch.tensor([803.0, 811, 819]), rtol=0, atol=1e-3)
    half = extractor(tuple(f.to(dtype) for f in features), box)
    # Not a rounding more than in fp32: in bf16, 801 would have become 800, and 825 824.
    torch.testing.assert_close(half, full, rtol=0, atol=0)


def test_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'late_module.py').write_text('value = 1\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    finder = rois._AfterImport('late_module', seen.append)
    monkeypatch.setattr(sys, 'meta_path', [finder, *sys.meta_path])
    importlib.import_module('json.tool')
    assert seen == []
    module = importlib.import_module('late_module')
    assert seen == [module]
    assert module.value == 1
    assert finder not in sys.meta_path
    monkeypatch.delitem(sys.modules, 'late_module')


def test_without_mmdet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rois, 'find_spec', lambda name: None)
    assert rois.keep_rois() == 'mmdet is not installed'
