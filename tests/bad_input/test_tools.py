"""Command lines of the tools with wrong files, names and numbers: one sentence, no traceback."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from ..reliability.data.sets import coco, coco_dataset, config, make_coco, write

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / 'configs/maskrcnn_vittt_demo.py')
QUICK = ('vittt_tiny_patch16_224', '--sizes', '32', '--repeats', '1', '--device', 'cpu')


class Run:
    """Runs a tool in the test's process, in a folder of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture) -> None:
        self.patch, self.capture = patch, capture

    def __call__(self, tool: str, *args: str, stream: str = 'err') -> tuple[object, str]:
        """The exit status and the text on stderr, or on stdout."""
        self.patch.setattr(sys, 'argv', [tool, *args])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / f'tools/{tool}.py'), run_name='__main__')
        return end.value.code, getattr(self.capture.readouterr(), stream)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    monkeypatch.chdir(tmp_path)
    Path('text.txt').write_text('neither weights nor a picture')
    torch.save({'state_dict': {'encoder.weight': torch.zeros(3)}}, 'other.pth')
    Path('empty').mkdir()
    return Run(monkeypatch, capsys)


# Tool, arguments before the wrong value, the wrong values, exit status, words of the error.
NUMBERS = ('-3', '0', 'x', '1.5', '', 'nan')
DEVICES = ('gpu', '', 'cpu:x', *(() if torch.cuda.is_available() else ('cuda',)))
NO_CHECKPOINT = ('no.pth', 'text.txt', 'empty', '')
NO_CONFIG = ('no.py', 'no/such.py', 'empty', '')
WRONG: list[tuple[tuple[str, ...], tuple[str, ...], int, tuple[str, ...]]] = [
    *(
        (args, NUMBERS, 2, (next(a for a in args if a.startswith('--')), '1 or more'))
        for args in (
            ('get_flops', 'vittt_t_in1k', '--depth'),
            ('get_flops', 'vittt_t_in1k', '--shape', '64'),
            ('checkpoint_info', 'other.pth', '--depth'),
            ('browse_dataset', DEMO, '--num-images'),
            ('draw_predictions', DEMO, 'a.pth', '--num-images'),
            *(('benchmark', QUICK[0], option) for option in ('--sizes', '--batch', '--repeats')),
        )
    ),
    *(
        ((*args, '--device'), DEVICES, 2, ('is not there',))
        for args in (
            ('benchmark', QUICK[0]),
            ('draw_predictions', DEMO, 'other.pth'),
            ('image_demo', DEMO, 'other.pth', 'a.jpg'),
        )
    ),
    *(
        ((tool,), NO_CHECKPOINT, 1, ('error: ',))
        for tool in ('checkpoint_info', 'publish_checkpoint', 'convert_checkpoint')
    ),
    *(
        ((tool,), NO_CONFIG, 1, ('error: there is no ',))
        for tool in ('browse_dataset', 'check_data', 'get_flops', 'train', 'draw_predictions')
    ),
]
# Arguments after the wrong value.
AFTER = {
    'publish_checkpoint': ('out.pth',),
    'convert_checkpoint': ('out.pth',),
    'draw_predictions': ('a.pth',),
}


@pytest.mark.parametrize(('args', 'values', 'status', 'words'), WRONG)
def test_wrong_values(run: Run, args: tuple, values: tuple, status: int, words: tuple) -> None:
    after = AFTER.get(args[0], ()) if len(args) == 1 else ()
    for value in values:
        code, error = run(*args, value, *after)
        assert code == status
        assert all(word in error for word in (*words, repr(value))), error
        assert status == 2 or error.startswith(words[0])
        assert not Path('out.pth').exists()


def test_wrong_words(run: Run) -> None:
    """Splits, data types, directions: the allowed ones are listed."""
    for args, allowed in {
        ('browse_dataset', DEMO, '--split'): 'val',
        ('check_data', DEMO, '--splits'): 'val',
        ('benchmark', QUICK[0], '--dtype'): 'bfloat16',
        ('convert_checkpoint', 'a.pth', 'b.pth', '--to'): 'public',
        ('train', DEMO, '--launcher'): 'slurm',
    }.items():
        code, error = run(*args, 'wordx')
        assert code == 2
        assert "'wordx'" in error
        assert allowed in error


def test_no_such_model_image_or_log(run: Run) -> None:
    demo = ('image_demo', DEMO, 'other.pth')
    for args, words in {
        ('get_flops', 'no_model'): ("no model 'no_model'", 'vittt_t_in1k'),
        ('benchmark', *QUICK[1:], 'deit_tiny_patch16_224', '--backbone'): ('deit_tiny', 'no part'),
        (*demo, 'no.jpg'): ("no image 'no.jpg'",),
        (*demo, 'text.txt'): ("'text.txt'", 'no image'),
        ('analyze_logs', 'empty'): ('empty', '--work-dir'),
        ('publish_checkpoint', 'other.pth', 'out.txt'): ("'out.txt'", '.pth'),
        ('convert_checkpoint', 'other.pth', 'out.pth'): ('neither a ViT³', 'encoder.weight'),
    }.items():
        code, error = run(*args)
        assert code == 1
        assert all(word in error for word in words), error


def test_configs_without_parts(run: Run) -> None:
    Path('bare.py').write_text("default_scope = 'mmdet'\n")
    Path('nothing.py').write_text('')
    for name in ('bare.py', 'nothing.py'):
        for tool, word in {
            'get_flops': 'has no model',
            'browse_dataset': 'no train_dataloader',
            'check_data': 'nothing to check',
        }.items():
            code, error = run(tool, name)
            assert code == 1
            assert word in error


def test_check_data(run: Run) -> None:
    """Errors make the exit status 1, warnings don't."""
    pytest.importorskip('mmdet')
    root = Path('set').absolute()
    make_coco(root)
    config(coco_dataset(root)).dump('cfg.py')

    def status(*args: str) -> tuple[object, str]:
        return run('check_data', 'cfg.py', '--splits', 'train', *args, stream='out')

    code, out = status()
    assert code == 0
    assert out.endswith('  nothing wrong\n1 data sets, 0 of them with errors\n')
    content = coco()
    content['annotations'][0]['bbox'][2] = 0
    write(root, content)
    code, out = status()
    assert code == 0
    assert '\n  warning  1 × boxes of no area' in out
    content['annotations'][1]['category_id'] = 5
    content['annotations'][3]['category_id'] = 6
    write(root, content)
    (root / 'images/1.jpg').write_bytes((root / 'images/1.jpg').read_bytes()[:900])
    code, out = status()
    assert code == 1
    assert '  error    2 × annotations of a category that is not listed: annotation 1 (cat' in out
    assert 'cut off' in out
    assert '1 data sets, 1 of them with errors' in out
    code, out = status('--no-images')
    assert code == 1
    assert 'cut off' not in out


BASE = f'_base_ = {str(ROOT / "tests/trainings/tiny_config.py")!r}\n'
MISSPELT = {
    "model = dict(_delete_=True, type='Vittt')": "no type 'Vittt', did you mean 'mmvttt.Vittt'?",
    "model = dict(_delete_=True, type='mmvttt.Vitt')": "did you mean 'mmvttt.Vittt'?",
    "model = dict(_delete_=True, type='mmvttt.Vittt', out_indexes=(3,))": (
        "no option 'out_indexes', did you mean 'out_indices'?"
    ),
    "model = dict(_delete_=True, type='mmvttt.T5', mixer=dict(inner=dict(type='SwiGUL')))": (
        'SwiGLU'
    ),
    "train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=2, max_epochs=1)": (
        "no option 'max_epochs', did you mean 'max_iters'?"
    ),
}


@pytest.mark.parametrize('line', MISSPELT)
def test_misspelt_types_and_options(line: str, run: Run) -> None:
    sentence = MISSPELT[line]
    run.patch.syspath_prepend(str(ROOT / 'tests/trainings'))
    Path('config.py').write_text(f'{BASE}{line}\n')
    code, output = run('train', 'config.py')
    assert code == 1
    assert sentence in output
    assert 'Traceback' not in output


def test_a_missing_toolbox_is_named_with_its_extra(run: Run) -> None:
    # A base that no other test asks for: what was found once is remembered.
    Path('config.py').write_text("_base_ = 'mmdet::_base_/schedules/schedule_20e.py'\n")

    def missing(package: str) -> bool:
        return False

    run.patch.setattr('mmengine.config.config.is_installed', missing)
    code, output = run('train', 'config.py')
    assert code == 1
    assert "pip install 'mmvttt[det]'" in output
