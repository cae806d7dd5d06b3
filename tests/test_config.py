"""Every way to name a config finds the same file, and a wrong name says what there is."""

from pathlib import Path

import pytest

from mmvttt.config import config_names, config_root, find_config, load_config
from mmvttt.errors import UsageError

NAME = 'maskrcnn_vittt_s_1x'


@pytest.mark.parametrize('name', [NAME, f'mmvttt::{NAME}', f'mmvttt::{NAME}.py'])
def test_a_name_is_the_file(name: str) -> None:
    found = find_config(name)
    assert found is not None
    assert found.samefile(config_root() / f'{NAME}.py')
    cfg = load_config(name)
    assert cfg.model.backbone.type == 'mmvttt.ViTAdapter'
    assert cfg.work_dir == f'work_dirs/{NAME}'


def test_a_config_of_a_toolbox() -> None:
    pytest.importorskip('mmdet')
    found = find_config('mmdet::_base_/models/mask-rcnn_r50_fpn')
    assert found is not None
    assert found.parts[-3:] == ('_base_', 'models', 'mask-rcnn_r50_fpn.py')


def test_paths_and_other_names_are_left_alone() -> None:
    assert find_config('somewhere/mine.py') == Path('somewhere/mine.py')
    assert find_config('resnet18') is None
    assert NAME in config_names()


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('maskrcnn_vittt_s_1', f"did you mean '{NAME}'"),
        ('nowhere.py', r'looked for /'),
        ('mmvttt::nowhere', 'there is, for example'),
        ('mmvttt::../setup.py', "mmvttt has no config '../setup.py'"),
        ('mmvttt::/etc/hosts', 'mmvttt has no config'),
        ('no_such_package::x.py', 'no_such_package'),
    ],
)
def test_a_wrong_name_is_a_sentence(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_config(name)
