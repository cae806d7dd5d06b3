"""`::` in `_base_`: packages are found without pkg_resources, mmvttt's configs from anywhere."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import mmengine.utils
import pytest
from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE

from mmvttt.openmmlab.compat import configs

from ..processes import python

INHERIT = """
import sys
sys.modules['pkg_resources'] = None  # importing it fails, as with setuptools >= 81
import mmvttt
from mmengine.config import Config
det = Config.fromfile('det.py')
assert det.model.roi_head.bbox_head.num_classes == 7, det.model
assert det.model.backbone.depth == 50
ours = Config.fromfile('ours.py')
assert ours.model.backbone.type == 'mmvttt.ViTAdapter', ours.model.backbone
assert ours.model.backbone.backbone.arch == 'tiny'
assert ours.default_scope == 'mmdet'
assert 'mmvttt' not in {d.get('_scope_') for d in (ours.model, ours.optim_wrapper)}
assert not {'mmcv', 'mmdet', 'mmseg', 'mmpretrain'} & set(sys.modules)
"""


def test_bases_of_packages_from_another_folder() -> None:
    Path('det.py').write_text(
        "_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'\n"
        'model = dict(roi_head=dict(bbox_head=dict(num_classes=7)))\n'
    )
    Path('ours.py').write_text(
        "_base_ = 'mmvttt::maskrcnn_vittt_s_1x.py'\n"
        "model = dict(backbone=dict(backbone=dict(arch='tiny')))\n"
    )
    python(INHERIT)


@pytest.mark.parametrize(
    'name',
    [
        """{{$X:.*|',__import__("pathlib").Path("ran").touch(),'("}}""",
        """{{'$X:.*|\\',open("ran","w"),"(")#'}}""",
        '{{$HOME:x}}', '{{ fileBasename }}', '{{{{_base_.model}}}}', '\\{{$HOME:x}}\n{{', '{ {x} }',
    ],
)  # fmt: skip
def test_a_dumped_name_is_data(name: str) -> None:
    content = dict(data=dict(classes=(name, 'dog')), other=[[name], {'1': dict(x=name)}])
    for file in ('dumped.py', 'dumped.json', 'dumped.yaml'):
        Config(content).dump(file)
        text = Path(file).read_text()
        assert '{{' not in text
        # Without tuples.
        assert json.dumps(Config.fromfile(file).to_dict()) == json.dumps(content)
    assert not Path('ran').exists()


@pytest.mark.parametrize('package', ['mmdet', 'mmsegmentation', 'mmpretrain', 'mmvttt', 'mmengine'])
def test_finds_installed_packages(package: str) -> None:
    assert configs.is_installed(package)
    assert mmengine.utils.is_installed(package)
    module = {'mmsegmentation': 'mmseg'}.get(package, package)
    path = Path(configs.get_installed_path(package))
    assert path.name == module
    assert (path / '__init__.py').is_file()


@pytest.mark.parametrize('package', ['no_such_package', 'no-such-package'])
def test_missing_packages(package: str) -> None:
    assert not configs.is_installed(package)
    with pytest.raises(PackageNotFoundError, match=package):
        configs.get_installed_path(package)


def test_forks_get_their_names_only_instead_of_the_originals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, 'MODULE2PACKAGE', table := dict(MODULE2PACKAGE))
    monkeypatch.setattr(configs.distributions, 'is_installed', lambda name: True)
    configs.name_packages()
    assert table == MODULE2PACKAGE
    monkeypatch.setattr(configs.distributions, 'is_installed', lambda n: n.startswith('onedl-'))
    configs.name_packages()
    names = [table[module] for module in ('mmseg', 'mmdet', 'mmvttt')]
    assert names == ['onedl-mmsegmentation', 'onedl-mmdetection', 'mmvttt']
