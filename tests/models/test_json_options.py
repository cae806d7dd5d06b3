"""Names that a config.json may hold: parts of mmvttt's own tables; no other imports."""

import inspect
import json
from contextlib import suppress
from functools import partial, reduce
from itertools import product

import pytest
import timm

import mmvttt
import mmvttt.models.timm
from mmvttt.checkpoints.load import load_pretrained
from mmvttt.errors import OptionError, OptionTypeError
from mmvttt.models import build
from mmvttt.models.layers.inner_models import INNER_MODELS
from mmvttt.models.layers.inner_options import InnerOptions
from mmvttt.models.layers.json_options import from_json
from mmvttt.models.layers.key_norms import KEY_NORMS
from mmvttt.models.layers.mixer import MIXERS, build_mixer, resolve_mixer
from mmvttt.models.linearize.folder import save_pretrained

SMALL = dict(depth=1, embed_dim=32, num_heads=2, img_size=32, num_classes=3)
EVIL = ('subprocess.Popen', {'type': 'subprocess.Popen', 'args': 'x'}, 'os:system', 'Conv2d')


def _options(parts):
    signatures = (inspect.signature(kind).parameters for kind in parts.values())
    return sorted({name for names in signatures for name in names} - {'embed_dims', 'num_heads'})


@pytest.fixture(autouse=True)
def resolver(monkeypatch):
    """Records the names that the resolver of configs is asked for."""
    asked = []
    monkeypatch.setattr(build, '_resolvers', [lambda option, name: asked.append((option, name))])
    return asked


@pytest.mark.parametrize('option', _options({**MIXERS, **INNER_MODELS}))
def test_no_option_of_a_file_reaches_the_resolver(option, resolver):
    for name, evil in product({**MIXERS, **INNER_MODELS}, EVIL):
        mixer = {'type': name, option: evil}
        if name in INNER_MODELS:
            mixer = {'type': 'TTTMixer', 'inner': mixer}
        with suppress(ValueError, TypeError):
            build_mixer(resolve_mixer(from_json({'mixer': mixer})['mixer'], mixer), 32, 2)
    assert resolver == []


def timm_folder(folder):
    model = timm.create_model('vit_tiny_patch16_224', **SMALL)
    mmvttt.linearize(model)
    save_pretrained(model, folder)
    return partial(timm.create_model, f'local-dir:{folder}', pretrained=True)


def timm_vit(folder):
    timm_folder(folder)
    options = {name: SMALL[name] for name in ('depth', 'embed_dim', 'num_heads')}
    model = mmvttt.TimmViT('vit_tiny_patch16_224', {}, options, img_size=32)
    return partial(load_pretrained, model, str(folder))


def diffusers_folder(folder):
    saved = pytest.importorskip('mmvttt.models.linearize.saved')
    options = dict(num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8)
    model = saved.diffusers.DiTTransformer2DModel(in_channels=1, num_embeds_ada_norm=10, **options)
    mmvttt.linearize(model)
    model.save_pretrained(folder)
    return partial(saved.DiTTransformer2DModel.from_pretrained, folder)


def dit3_folder(folder):
    dit3 = pytest.importorskip('mmvttt.models.generation.dit3')
    arch = dict(embed_dims=32, num_layers=1, num_heads=2)
    dit3.DiT3(**dit3.DIT5 | dict(arch=arch, in_channels=1)).save_pretrained(folder)
    return partial(dit3.DiT3.from_pretrained, folder)


FOLDERS = {
    timm_folder: ('model_args', 'linearize'),
    timm_vit: ('model_args', 'linearize'),
    diffusers_folder: ('linearize',),
    dit3_folder: ('mixer',),
}


@pytest.mark.parametrize('make', FOLDERS, ids=lambda make: make.__name__)
def test_a_folder_names_our_parts_only(make, tmp_path, resolver):
    load = make(tmp_path)
    load()
    path = tmp_path / 'config.json'
    written = path.read_text()
    for option, evil in product(('inner', 'loss', 'key_norm'), EVIL):
        config = json.loads(written)
        reduce(dict.__getitem__, FOLDERS[make], config)[option] = evil
        path.write_text(json.dumps(config))
        with pytest.raises((OptionError, OSError)):
            load()
    assert resolver == []


@pytest.mark.parametrize(
    'args', [dict(source='local-dir:/tmp'), dict(source='hf-hub:a/b'), dict(checkpoint_path='a')]
)
def test_a_folder_names_no_other_source(args, tmp_path):
    load = timm_folder(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    config['model_args'] |= args
    path.write_text(json.dumps(config))
    with pytest.raises((ValueError, TypeError), match=r'source|checkpoint_path'):
        load()
    with pytest.raises(TypeError):
        timm.create_model('linear_vit')


def test_inner_options_have_one_form():
    options = InnerOptions(inner='SwiGLU', key_norm='instance', locality='dwc_qk', epochs=1)
    same = InnerOptions(
        inner=dict(type=INNER_MODELS['SwiGLU']),
        key_norm=KEY_NORMS['instance'],
        locality='dwc_qk',
        backend='reference',
    )
    assert options.to_json() == same.to_json()
    assert options.to_json() == dict(inner='SwiGLU', key_norm='instance', locality='dwc_qk')
    other = InnerOptions(inner='SwiGLU', key_norm='instance', key_position=7)
    assert other.key_position == (7, 7)
    assert other.to_json() == dict(
        inner='SwiGLU', key_norm='instance', key_position=[7, 7], locality=None
    )
    with pytest.raises(OptionTypeError, match='epochs'):
        InnerOptions.of('linearize', inner='FC', epoch=2)
