"""`test.py --tta`: the recipes that have it, and which versions of an image it makes."""

import math

import pytest
from mmengine.model import BaseTTAModel
from mmengine.registry import MODELS

pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')
pytest.importorskip('mmseg')

from mmvttt.openmmlab.apis.evaluate import enable_tta
from mmvttt.openmmlab.config import config_names, load_config
from mmvttt.openmmlab.data.dataset_config import datasets_of
from mmvttt.openmmlab.registry import resolve_type
from mmvttt.openmmlab.tasks import task_of

# A mirrored digit is no digit; diffusion models see no photographs.
WITHOUT = ('digits', 'dit', 'sd35', 'distil')


def test_wrapped_sets_and_several_metrics() -> None:
    cfg = load_config('maskrcnn_vittt_t_1x')
    cfg.test_evaluator = [dict(type='DumpResults'), cfg.test_evaluator]
    cfg.test_dataloader.dataset = dict(type='ConcatDataset', datasets=[cfg.test_dataloader.dataset])
    enable_tta(cfg, task_of(cfg), datasets_of(cfg, ('test',)))
    assert cfg.test_evaluator[1].metric == 'bbox'
    assert 'pipeline' not in cfg.test_dataloader.dataset
    assert cfg.test_dataloader.dataset.datasets[0].pipeline == cfg.tta_pipeline


@pytest.mark.parametrize('name', [n for n in config_names() if not any(w in n for w in WITHOUT)])
def test_every_recipe_merges_versions_of_an_image(name: str) -> None:
    cfg = load_config(name)
    size = [step.scale for step in cfg.test_dataloader.dataset.pipeline if step.type == 'Resize']
    enable_tta(cfg, task_of(cfg), datasets_of(cfg, ('test',)))
    assert issubclass(resolve_type(cfg.model.type, MODELS, cfg.default_scope), BaseTTAModel)
    (step,) = (s for s in cfg.test_dataloader.dataset.pipeline if s.type == 'TestTimeAug')
    assert math.prod(map(len, step.transforms)) >= 2
    if cfg.default_scope == 'mmdet':
        assert cfg.test_evaluator.metric in ('bbox', ['bbox'])
        # One version has the size of the plain test.
        assert size[0] in [choice.scale for choice in step.transforms[0]]
