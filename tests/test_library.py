"""The library by itself: it loads no OpenMMLab and no OpenCV, and changes no other package.

What it does alone is tested by tests/kernels, tests/models, …, which `make test-library` runs in an
environment without them.
"""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .processes import python

DOOR = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'cv2')

# Every module of the library, and a use of each part.
USE = """
import importlib, pathlib
import torch, mmvttt, ttt_kernels

EXTRAS = ('matplotlib', 'diffusers', 'llvmlite', 'numba', 'sklearn', 'transformers')
for package in (ttt_kernels, mmvttt):
    root = pathlib.Path(package.__path__[0])
    for file in root.rglob('*.py'):
        parts = file.relative_to(root).with_suffix('').parts
        if parts[0] in ('openmmlab', 'registry', '.mim') or parts[-1] in ('__main__', '__init__'):
            continue
        try:
            importlib.import_module('.'.join([package.__name__, *parts]))
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise

import timm
from mmvttt.models import HViT3, ViTAdapter, Vittt
vit = timm.create_model('vit_tiny_patch16_224', depth=2, num_classes=3, img_size=64)
mmvttt.linearize(vit)
arch = dict(embed_dims=64, num_layers=2, num_heads=2, feedforward_channels=64)
for model in (
    Vittt(arch),
    ViTAdapter(backbone=Vittt(arch)),
    HViT3(dict(embed_dims=(16, 32), depths=(1, 1), num_heads=(1, 2))),
    vit,
    timm.create_model('vit3_tiny_patch16_224', num_classes=3),
):
    out = model(torch.randn(1, 3, 64, 64))
    sum(x.mean() for x in (out if isinstance(out, tuple) else (out,))).backward()
"""

# After one backbone was built, and after all of it.
LOADED = f"""
import json, sys, mmvttt
mmvttt.Vittt('tiny')
first = list(sys.modules)
{USE}
print(json.dumps([first, list(sys.modules)]))
"""

# Functions and classes of other packages before and after: what a patch replaces.
CHANGED = f"""
import json, sys, types, importlib, contextlib
for name in json.loads(sys.stdin.read()):
    if name.partition('.')[0] not in ('mmvttt', 'ttt_kernels', '__main__', '__mp_main__'):
        with contextlib.suppress(Exception):
            importlib.import_module(name)

CODE = (type, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)

def code():
    found = {{}}
    for name, module in list(sys.modules.items()):
        # The interpreter's own counters and caches change by themselves.
        if module is None or name.partition('.')[0] in ('mmvttt', 'ttt_kernels', '__main__'):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, CODE):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {{(name, f'{{key}}.{{k}}'): v
                          for k, v in list(vars(value).items()) if isinstance(v, CODE)}}
    return found

before = code()
{USE}
after = code()
print(json.dumps(sorted('.'.join(k) for k, v in before.items() if after.get(k) is not v)))
"""


@pytest.fixture(scope='module')
def loaded() -> tuple[list[str], list[str]]:
    """Modules that are there with one backbone, and after all of the library was used."""
    return json.loads(python(LOADED).stdout)


def test_no_openmmlab_and_no_opencv_is_loaded(loaded: tuple[list[str], list[str]]) -> None:
    names = loaded[1]
    assert 'mmvttt.models.linearize' in names
    assert [name for name in names if name.partition('.')[0] in DOOR] == []


def test_a_backbone_loads_no_mixer_of_another(loaded: tuple[list[str], list[str]]) -> None:
    names = loaded[0]
    assert 'mmvttt.models.layers.ttt_linear_mixer' in names
    others = ('layers.ttt_mixer', 'layers.vit3_mixer', 'backbones.vit3', 'linearize', 'adapters')
    assert not {f'mmvttt.models.{name}' for name in others} & set(names)


def test_no_other_package_is_changed(loaded: tuple[list[str], list[str]]) -> None:
    assert json.loads(python(CHANGED, stdin=json.dumps(loaded[1])).stdout) == []


# The command `mmvttt` of an environment without OpenMMLab, and without matplotlib: what it is given
# and what it prints, run in one process.
ALONE = f"""
import contextlib, io, json, os, runpy, sys
from importlib.machinery import PathFinder

look, hidden = PathFinder.find_spec, {(*DOOR, 'rich', 'matplotlib')}
PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.partition('.')[0] in hidden else look(name, *rest))
from mmvttt import __main__

def run(python, arguments):
    sys.argv = arguments[1:]
    runpy.run_path(arguments[1], run_name='__main__')

os.execv, printed = run, []
for arguments in json.load(sys.stdin):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            __main__.main(arguments)
        except SystemExit as end:
            # Python itself prints a message that is no status.
            print(end.code if isinstance(end.code, str) else f'status {{end.code or 0}}')
    printed.append(text.getvalue())
print(json.dumps(printed))
"""
MISSING = r"OpenMMLab is not installed: pip install 'mmvttt\[onedl-det\]'"
COMMANDS = {
    '--help': 'usage: mmvttt',
    'train x': f'^error: {MISSING}.*\nstatus 1$',
    'predict pedestrians a.jpg': f'^error: {MISSING}.*\nstatus 1$',
    'get_flops vittt_t_in1k': f"^error: there is no model 'vittt_t_in1k'.*{MISSING}.*\nstatus 1$",
    'get_flops vit_tiny_patch16_224 --cfg-options num_classes=10': '5\\.526 M parameters',
    'publish_checkpoint mmvttt://cifar10_vittt_nano out.pth': r'out-\w+\.pth: ',
    'export vit3_tiny_patch16_224 --out out.pt2 --shape 32 48 --fixed-size': 'wrote out.pt2',
    'export vit3_tiny_patch16_224 --out out.onnx --predictions': f'^error: {MISSING}',
    'benchmark vit3_tiny_patch16_224 --sizes 32 --repeats 1 --device cpu --plot out.png': (
        r'^vit3.* 32×32.*ms(.|\n)*error: matplotlib is not installed: .*mmvttt\[plots\]'
    ),
    'benchmark lcnet_050 --sizes 32 --repeats 1 --device cpu --compile': '^error: nothing to comp',
}


def test_the_command_without_openmmlab() -> None:
    commands = json.dumps([command.split() for command in COMMANDS])
    printed = json.loads(python(ALONE, stdin=commands).stdout)
    for (command, expected), text in zip(COMMANDS.items(), printed, strict=True):
        assert re.search(expected, text, re.MULTILINE), f'mmvttt {command}\n{text}'
        assert 'Traceback' not in text


# --help of every tool in Python, in one process of a machine that has none of what they import.
HELP = f"""
import contextlib, io, json, runpy, subprocess, sys
from mmvttt.__main__ import tool_lines, tools

for name in {(*DOOR, 'torch', 'numpy', 'timm', 'rich', 'matplotlib', 'ttt_kernels')}:
    sys.modules[name] = None
printed = dict(mmvttt=chr(10).join(tool_lines()))
for name, path in tools().items():
    if path.suffix == '.sh':
        shell = subprocess.run(['bash', path, '--help'], capture_output=True, text=True)
        printed[name] = shell.stderr
        continue
    text = io.StringIO()
    sys.argv = [str(path), '--help']
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        runpy.run_path(str(path), run_name='__main__')
    printed[name] = text.getvalue()
print(json.dumps(printed))
"""


def test_help_of_every_tool_needs_nothing() -> None:
    printed = json.loads(python(HELP).stdout)
    listed = [line.split(maxsplit=1) for line in printed.pop('mmvttt').splitlines()]
    assert [name for name, _ in listed] == list(printed)
    assert [name for name in printed if name in ('predict', 'train')] == ['predict', 'train']
    for name in [name for name in printed if name.startswith(('dist_', 'slurm_'))]:
        assert re.match(rf'usage: .*{name}\.sh .*CONFIG', printed.pop(name))
    for name, text in printed.items():
        assert text.startswith(f'usage: mmvttt {name} '), name
        assert dict(listed)[name] in text
        assert '\noptions:\n' in text


@pytest.mark.skipif(find_spec('mmengine') is not None, reason='for `make test-library`')
def test_the_wheel_is_tested() -> None:
    import mmvttt

    assert Path(mmvttt.__file__).is_relative_to(sys.prefix)
