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


def test_bases_with_the_same_key_are_a_sentence(tmp_path: Path) -> None:
    for name in ('a', 'b'):
        (tmp_path / f'{name}.py').write_text("model = dict(type='Vittt')\n")
    (tmp_path / 'c.py').write_text("_base_ = ['./a.py', './b.py']\n")
    with pytest.raises(UsageError, match=r"c\.py' .*'model'"):
        load_config(tmp_path / 'c.py')


def test_a_dict_in_the_place_of_a_name_is_a_sentence(tmp_path: Path) -> None:
    child = tmp_path / 'child.py'
    base = "_base_ = './base.py'\n"
    (tmp_path / 'base.py').write_text("model = dict(arch='tiny')\n")
    child.write_text(base + 'model = dict(arch=dict(depth=2))\n')
    with pytest.raises(UsageError, match=r"child\.py' .*arch=.*_delete_=True"):
        load_config(child)
    child.write_text(base + 'model = dict(arch=dict(_delete_=True, depth=2))\n')
    assert load_config(child).model.arch == dict(depth=2)
    child.write_text(base)
    with pytest.raises(UsageError, match=r'arch=.*_delete_=True'):
        load_config(child, cfg_options={'model.arch.depth': 2})
    child.write_text(base + 'depth = len(3)\n')
    with pytest.raises(UsageError, match='has no len'):
        load_config(child)
    child.write_text('model = [dict()]\n')
    with pytest.raises(UsageError):
        load_config(child, cfg_options={'model.1.depth': 2})


def test_an_error_in_a_config_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / 'mine.py'
    path.write_text('a = 3\nb = None + a\n')
    with pytest.raises(UsageError, match=r'TypeError: .*mine\.py, line 2\)'):
        load_config(path)


def test_bases_and_imports_that_are_missing(tmp_path: Path) -> None:
    child = tmp_path / 'child.py'
    child.write_text(
        'from mmengine.config import read_base\nwith read_base():\n    from .nowhere import *\n'
    )
    with pytest.raises(UsageError, match=r"child\.py' cannot be read: .*nowhere\.py not found"):
        load_config(child)
    pytest.importorskip('mmdet')
    # A user's own module, not a base from mmdet.
    child.write_text("custom_imports = dict(imports=['my_mmdet_models'])\n")
    with pytest.raises(ImportError, match='my_mmdet_models'):
        load_config(child)


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
    ('name', 'words'),
    [
        ('maskrcnn_vittt_s_1', f"did you mean '{NAME}'"),
        ('nowhere.py', r'looked for /'),
        ('mmvttt::nowhere', "mmvttt has no config 'nowhere"),
        ('mmvttt::../setup.py', "mmvttt has no config '../setup.py'"),
        ('mmvttt::/etc/hosts', 'mmvttt has no config'),
        ('no_such_package::x.py', 'no_such_package'),
    ],
)
def test_a_wrong_name_is_a_sentence(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_config(name)


@pytest.mark.parametrize(
    ('option', 'words'),
    [
        ('train_pipeline.2.scale', 'train_pipeline is a variable .* set the copies that are used'),
        ('data_root', 'data_root is a variable of the config file'),
        ('norm_cfg.type', "nothing reads 'norm_cfg'.*; a config has auto_scale_lr, .*, work_dir"),
        ('modle.backbone', "did you mean 'model'"),
        ('optim_wraper.optimizer.lr', "did you mean 'optim_wrapper'"),
        # A key of mmdet 2.x.
        ('total_epochs', "nothing reads 'total_epochs'"),
    ],
)
def test_an_option_that_nothing_reads_is_a_sentence(option: str, words: str) -> None:
    """mmengine ignores each: a training at other sizes, of other data, or at another rate."""
    pytest.importorskip('mmdet')
    with pytest.raises(UsageError, match=rf'^--cfg-options .*{words}'):
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
