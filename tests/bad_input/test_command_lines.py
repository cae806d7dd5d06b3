"""Options and folders that ended in a traceback, or in silence: one sentence, or what was meant."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmvttt.cli import add_cfg_options
from mmvttt.errors import UsageError


@pytest.mark.parametrize(
    ('given', 'value'),
    [
        ("{'a': [1, 2]}", {'a': [1, 2]}),
        ('[(1,2),(3,4)]', [(1, 2), (3, 4)]),
        ('(1,2),(3,4)', [(1, 2), (3, 4)]),
        # Texts without quotes, and what is no literal.
        ('bbox,segm', ['bbox', 'segm']),
        ('a/b.json,/c/d.json', ['a/b.json', '/c/d.json']),
        ('data/x-1.pth', 'data/x-1.pth'),
        ('1/15', '1/15'),
        ('-1e-4', -1e-4),
        ('true', True),
        ('None', None),
        ('', ''),
    ],
)
def test_values_of_options(given: str, value: object) -> None:
    parser = argparse.ArgumentParser()
    add_cfg_options(parser)
    assert parser.parse_args(['--cfg-options', f'a.b={given}']).cfg_options == {'a.b': value}


@pytest.mark.parametrize('given', ['[bbox,segm]', '(a,b)', '{a:1}', "dict(type='x')"])
def test_values_that_are_no_literals(given: str, capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    add_cfg_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(['--cfg-options', f'a.b={given}'])
    assert f'--cfg-options a.b={given}: write a Python literal' in capsys.readouterr().err


def test_resume_in_an_empty_folder_begins_from_load_from(run: Callable) -> None:
    with pytest.raises(UsageError):
        run('train', work_dir='a', resume='auto', cfg_options={'load_from': 'nope.pth'})
    run('train', work_dir='b')
    before = torch.load('b/epoch_2.pth', weights_only=False)['state_dict']
    options = {'load_from': 'b/epoch_2.pth', 'optim_wrapper.optimizer.lr': 0.0}
    runner = run('train', work_dir='c', resume='auto', cfg_options=options)
    # With a rate of 0 everything but the statistics of BatchNorm stays.
    for name, weight in runner.model.named_parameters():
        assert torch.equal(weight, before[name]), name


def test_frozen_blocks_that_begin_at_random_are_said(caplog: Any) -> None:
    from mmvttt.models.backbones import TimmViT

    def build(**options: Any) -> TimmViT:
        caplog.clear()
        return TimmViT('vit_tiny_patch16_224', model_options=dict(depth=2), **options)

    build(linearize=dict(), frozen_stages=1)
    assert 'initialised randomly and not trained' in caplog.text
    build(linearize=dict(), frozen_stages=0)
    assert not caplog.text
    # The softmax twin of a config with linearize=dict().
    assert build(linearize=False, frozen_stages=1).linearization is None
    assert not caplog.text
