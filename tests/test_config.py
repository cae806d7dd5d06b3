"""Every way to name a config finds the same file; a wrong name gets a list of the right ones."""

from pathlib import Path

import pytest
from mmengine.registry import MODELS

from mmvttt.errors import UsageError
from mmvttt.openmmlab.config import config_root, find_config, load_config
from mmvttt.openmmlab.registry import resolve_type

NAME = 'maskrcnn_vittt_s_1x'


@pytest.mark.parametrize('name', [NAME, f'mmvttt::{NAME}', f'mmvttt::{NAME}.py'])
def test_a_name_is_the_file(name: str) -> None:
    actual = find_config(name)
    assert actual is not None
    assert actual.samefile(config_root() / f'{NAME}.py')
    cfg = load_config(name)
    assert cfg.model.backbone.type == 'mmvttt.ViTAdapter'
    assert cfg.work_dir == f'work_dirs/{NAME}'


# Configs in the folder of a base.py.
BASE = "_base_ = './base.py'\n"
WRONG = [
    "_base_ = ['./base.py', './twin.py']\n",
    BASE + 'model = dict(arch=dict(depth=2))\n',
    BASE + 'depth = len(3)\n',
    'from mmengine.config import read_base\nwith read_base():\n    from .no import *\n',
]


@pytest.mark.parametrize('text', WRONG)
def test_a_wrong_config_is_a_sentence(text: str, tmp_path: Path) -> None:
    for name in ('base', 'twin'):
        (tmp_path / f'{name}.py').write_text("model = dict(arch='tiny')\n")
    (tmp_path / 'child.py').write_text(text)
    with pytest.raises(UsageError, match=r"child\.py' "):
        load_config(tmp_path / 'child.py')


def test_a_dict_in_the_place_of_another_value(tmp_path: Path) -> None:
    child = tmp_path / 'child.py'
    child.write_text("model = dict(arch='tiny', parts=[dict()])\n")
    for option in ('model.arch.depth', 'model.parts.1.depth'):
        with pytest.raises(UsageError):
            load_config(child, cfg_options={option: 2})
    (tmp_path / 'base.py').write_text(child.read_text())
    child.write_text(BASE + 'model = dict(arch=dict(_delete_=True, depth=2))\n')
    assert load_config(child).model.arch == dict(depth=2)


def test_a_misspelt_key_is_named(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / 'child.py').write_text('model, optim_wraper, test_pipeline = dict(), dict(), []\n')
    load_config(tmp_path / 'child.py')
    (text,) = logged
    assert "'optim_wraper'" in text


def test_a_module_of_a_user_that_is_missing(tmp_path: Path) -> None:
    """Not a base from mmdet."""
    pytest.importorskip('mmdet')
    (tmp_path / 'child.py').write_text("custom_imports = dict(imports=['my_mmdet_models'])\n")
    with pytest.raises(ImportError):
        load_config(tmp_path / 'child.py')


CLASSES = """
from mmdet.models import MaskRCNN
from mmdet.models.losses.smooth_l1_loss import L1Loss
default_scope = None
model = dict(type=MaskRCNN, loss=dict(type=L1Loss))
"""


def test_a_pure_python_config_is_of_its_model_s_toolbox_and_so_is_its_dump(tmp_path: Path) -> None:
    models = pytest.importorskip('mmdet.models')
    (tmp_path / 'classes.py').write_text(CLASSES)
    cfg = load_config(tmp_path / 'classes.py')
    assert cfg.default_scope == 'mmdet'
    cfg.default_scope = None
    cfg.dump(tmp_path / 'dumped.py')
    dumped = load_config(tmp_path / 'dumped.py')
    assert dumped.default_scope == 'mmdet'
    # mmdet.models.losses has a function with the name of this class's module.
    kind = dumped.model.loss.type
    assert kind == 'mmdet.models.losses.smooth_l1_loss.L1Loss'
    assert resolve_type(kind, MODELS, 'mmdet') is models.L1Loss


@pytest.mark.parametrize(
    'name',
    [
        *('maskrcnn_vittt_s_1', 'nowhere.py', 'no_such_package::x.py'),
        *('mmvttt::nowhere', 'mmvttt::../setup.py', 'mmvttt::/etc/hosts'),
    ],
)
def test_a_wrong_name_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match=r'no config|no_such_package'):
        load_config(name)


@pytest.mark.parametrize(
    ('option', 'word'),
    [
        ('train_pipeline.2.scale', 'copies'),
        ('norm_cfg.type', "nothing reads 'norm_cfg'"),
        ('optim_wraper.optimizer.lr', "did you mean 'optim_wrapper'"),
    ],
)
def test_an_option_that_nothing_reads_is_an_error(option: str, word: str) -> None:
    """mmengine ignores each: a training at other sizes, of other data, or at another rate."""
    pytest.importorskip('mmdet')
    with pytest.raises(UsageError, match=word):
        load_config('maskrcnn_vittt_t_1x', cfg_options={option: (640, 480)})


def test_options_that_are_read_are_taken() -> None:
    pytest.importorskip('mmdet')
    options = {'compile': False, 'test_dataloader.dataset.pipeline.1.scale': (640, 480)}
    cfg = load_config('maskrcnn_vittt_t_1x', cfg_options=options)
    assert cfg.compile is False
    assert cfg.test_dataloader.dataset.pipeline[1].scale == (640, 480)


def test_weights_that_a_base_of_mmsegmentation_names() -> None:
    config = dict(type='mmvttt.ViTAdapter', backbone=dict(type='mmvttt.Vittt'))
    with pytest.raises(TypeError, match=r'set model\.pretrained=None'):
        MODELS.build(dict(config, pretrained='open-mmlab://resnet50_v1c'))
