"""Command lines of the tools with wrong files, names and numbers: one sentence, no traceback."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from ..reliability.data.sets import coco, coco_dataset, config, make_coco, write
from .cases import run_cases

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / 'configs/maskrcnn_vittt_demo.py')
QUICK = ('vittt_tiny_patch16_224', '--sizes', '32', '--repeats', '1', '--device', 'cpu')


class Run:
    """Runs a tool in the test's process, in a folder of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture) -> None:
        self.patch, self.capture = patch, capture

    def __call__(self, tool: str, *args: str) -> tuple[object, str]:
        """The exit status and the text on stderr."""
        self.patch.setattr(sys, 'argv', [tool, *args])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / f'tools/{tool}.py'), run_name='__main__')
        return end.value.code, self.capture.readouterr().err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    monkeypatch.chdir(tmp_path)
    Path('text.txt').write_text('neither weights nor a picture')
    torch.save({'state_dict': {'encoder.weight': torch.zeros(3)}}, 'other.pth')
    Path('empty').mkdir()
    return Run(monkeypatch, capsys)


numbers = st.integers(max_value=0).map(str) | st.sampled_from(['x', '1.5', '', 'nan', '1e3'])
# Tool, arguments before the wrong value, generated values, words of the error.
OPTIONS = [
    ('get_flops', ('vittt_t_in1k', '--depth'), numbers, ('--depth', '1 or more')),
    ('get_flops', ('vittt_t_in1k', '--shape', '64'), numbers, ('--shape', '1 or more')),
    ('checkpoint_info', ('other.pth', '--depth'), numbers, ('--depth', '1 or more')),
    ('browse_dataset', (DEMO, '--num-images'), numbers, ('--num-images', '1 or more')),
    ('draw_predictions', (DEMO, 'a.pth', '--num-images'), numbers, ('--num-images', '1 or')),
    *(
        ('benchmark', ('vittt_tiny_patch16_224', option), numbers, (option, '1 or more'))
        for option in ('--sizes', '--batch', '--repeats')
    ),
]
NO_FILE = ('no.pth', 'text.txt', 'empty', '')


@pytest.mark.parametrize(
    ('tool', 'args', 'values', 'words'), OPTIONS, ids=lambda x: x if isinstance(x, str) else ''
)
def test_numbers(run: Run, tool: str, args: tuple, values: st.SearchStrategy, words: tuple) -> None:
    def check(value: str) -> None:
        # argparse takes a word that begins with a dash for an option, unless it is a number.
        code, error = run(tool, *args, value)
        assert code == 2
        assert all(word in error for word in (*words, repr(value))), error

    run_cases(values, check, 4)


@pytest.mark.parametrize('tool', ['benchmark', 'draw_predictions', 'image_demo'])
def test_devices(run: Run, tool: str) -> None:
    args = {
        'benchmark': ('vittt_tiny_patch16_224',),
        'draw_predictions': (DEMO, 'other.pth'),
        'image_demo': (DEMO, 'other.pth', 'a.jpg'),
    }[tool]
    names = st.sampled_from(
        ['gpu', '', 'cpu:x'] + (['cuda'] if not torch.cuda.is_available() else [])
    )

    def check(name: str) -> None:
        code, error = run(tool, *args, '--device', name)
        assert code == 2
        assert f'{name!r} is not there' in error

    run_cases(names, check, 4)


@pytest.mark.parametrize(
    ('tool', 'args'),
    [
        ('checkpoint_info', ()),
        ('publish_checkpoint', ('out.pth',)),
        ('convert_checkpoint', ('out.pth',)),
    ],
)
def test_files_that_are_no_checkpoint(run: Run, tool: str, args: tuple) -> None:
    def check(name: str) -> None:
        code, error = run(tool, name, *args)
        assert code == 1
        assert error.startswith('error: ')
        assert repr(name) in error
        assert not Path('out.pth').exists()

    run_cases(st.sampled_from(NO_FILE), check, 4)


@pytest.mark.parametrize(
    'tool', ['browse_dataset', 'check_data', 'get_flops', 'train', 'draw_predictions']
)
def test_files_that_are_no_config(run: Run, tool: str) -> None:
    args = ('a.pth',) if tool == 'draw_predictions' else ()

    def check(name: str) -> None:
        code, error = run(tool, name, *args)
        assert code == 1
        assert error.startswith('error: there is no ')
        assert f"'{name}'" in error

    run_cases(st.sampled_from(['no.py', 'no/such.py', 'empty', '']), check, 4)


def test_wrong_words(run: Run) -> None:
    """Splits, data types, directions: the allowed ones are listed."""
    cases = {
        ('browse_dataset', DEMO, '--split'): 'val',
        ('check_data', DEMO, '--splits'): 'val',
        ('benchmark', 'vittt_tiny_patch16_224', '--dtype'): 'bfloat16',
        ('convert_checkpoint', 'a.pth', 'b.pth', '--to'): 'public',
        ('train', DEMO, '--launcher'): 'slurm',
    }

    def check(value: tuple) -> None:
        args, word = value
        code, error = run(*args, word)
        assert code == 2
        assert repr(word) in error
        assert cases[args] in error

    words = st.from_regex(r'[a-z]{2,6}x', fullmatch=True)
    run_cases(st.tuples(st.sampled_from(sorted(cases)), words), check, 10)


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


def test_check_data(run: Run, capsys: pytest.CaptureFixture) -> None:
    """Errors make the exit status 1, warnings don't."""
    pytest.importorskip('mmdet')
    root = Path('set').absolute()
    make_coco(root)
    config(coco_dataset(root)).dump('cfg.py')
    script = str(ROOT / 'tools/check_data.py')

    def status(*args: str) -> tuple[object, str]:
        run.patch.setattr(sys, 'argv', ['check_data', 'cfg.py', '--splits', 'train', *args])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name='__main__')
        return end.value.code, capsys.readouterr().out

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
