"""`test.py --tta`: the recipes that have it, and which versions of an image it makes."""

import pytest

pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')
pytest.importorskip('mmseg')

from mmvttt.openmmlab.apis.evaluate import enable_tta
from mmvttt.openmmlab.config import config_names, load_config

# A mirrored digit is no digit; diffusion models see no photographs.
WITHOUT = ('digits', 'dit', 'sd35', 'distil')


@pytest.mark.parametrize('name', [n for n in config_names() if not any(w in n for w in WITHOUT)])
def test_every_recipe_merges_versions_of_an_image(name: str) -> None:
    cfg = load_config(name)
    if cfg.default_scope == 'mmdet':
        cfg.test_evaluator.metric = 'bbox'
    enable_tta(cfg)
    (step,) = (s for s in cfg.test_dataloader.dataset.pipeline if s.type == 'TestTimeAug')
    versions = 1
    for choices in step.transforms:
        versions *= len(choices)
    assert versions >= 2
    # Detectors have the size of the test, and another one where the image is not mirrored.
    if cfg.default_scope == 'mmdet':
        (resize,) = (s for s in load_config(name).test_dataloader.dataset.pipeline
                     if s.type == 'Resize')  # fmt: skip
        scales = [tuple(choice.scale) for choice in step.transforms[0]]
        assert tuple(resize.scale) in scales
