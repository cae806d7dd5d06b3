"""The examples in the documents run: every block that a comment marks, page by page.

`<!-- run -->` before a block runs it: Python alone, in a process that has imported nothing of ours,
a console block line by line. `<!-- run: more -->` continues the block above.
`<!-- run: file NAME -->` writes the block to a file for the blocks after it, and
`<!-- run: with PACKAGE -->` runs it where the package is installed. All other blocks need data,
weights or a GPU, or show an output: of these, imports are made and command lines parsed.
"""

import argparse
import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmvttt import cli
from mmvttt.__main__ import tools
from mmvttt.cli import tool_name

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
NOTEBOOKS = sorted((ROOT / 'docs' / 'notebooks').glob('*.ipynb'))
BLOCK = re.compile(r'<!-- run(?:: (file|with|more)(?: (\S+))?)? -->\n```(\w+)\n(.*?)```', re.DOTALL)
# Without a marker; and the command lines in them, but for schemes of one.
OTHERS = re.compile(r'```(python|console)\n(.*?)```', re.DOTALL)
COMMAND = re.compile(
    r'(?:^|\s)(?:mmvttt|python tools/)\s*(\w+)(?:\.py)? ([^…$|>&\n]+)$', re.MULTILINE
)
LINK = re.compile(r'\]\(([^)#]+)\)')
CODE = re.compile(r'```.*?```', re.DOTALL)
FILE = re.compile(r'(?<![\w/])((?:tools|configs)/[\w/]+\.(?:py|sh|yml))')


def test_there_is_something_to_run() -> None:
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 10
    for page in PAGES:
        text = page.read_text()
        # A marker that the pattern misses would be an example that does not run.
        assert text.count('<!-- run') == len(BLOCK.findall(text)), page.name


# Runs lists of blocks of Python, each in a process of its own. What all import is imported once.
RUNNER = """
import json, os, sys, traceback
import timm, torch
for line in sys.stdin:
    folder, blocks = json.loads(line)
    child = os.fork()
    if not child:
        try:
            os.chdir(folder)
            output = os.open('.output', os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2)
            namespace = {'__name__': 'snippet'}
            for code in blocks:
                exec(compile(code, 'example', 'exec'), namespace)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
# `python` of the examples is the one that runs the tests.
ENVIRONMENT = {
    **os.environ,
    'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
}


@pytest.fixture(scope='module')
def python() -> Iterator[Callable[[Path, list[str]], str | None]]:
    """Runs blocks of Python in a folder, and returns the output if they fail."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    with subprocess.Popen([sys.executable, '-c', RUNNER], **pipes) as runner:

        def run(folder: Path, blocks: list[str]) -> str | None:
            runner.stdin.write(f'{json.dumps([str(folder), blocks])}\n')
            runner.stdin.flush()
            failed = int(runner.stdout.readline())
            return (folder / '.output').read_text() if failed else None

        yield run


def console(folder: Path, code: str) -> str | None:
    """Runs lines of a shell in a folder, and returns their errors if one fails."""
    command = ['bash', '-euc', code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
    return done.stderr if done.returncode else None


@pytest.mark.parametrize(
    'page', [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.stem
)
def test_examples_run(page: Path, tmp_path: Path, python: Callable) -> None:
    for name in ('tools', 'configs'):
        (tmp_path / name).symlink_to(ROOT / name)
    missing: list[str] = []
    examples: list[tuple[str, list[str]]] = []
    for kind, name, language, code in BLOCK.findall(page.read_text()):
        if kind == 'more':
            examples[-1][1].append(code)
        elif kind == 'with' and find_spec(name) is None:
            missing.append(name)
        else:
            assert kind == 'file' or language in ('python', 'console'), f'{language!r} cannot run'
            examples.append((name if kind == 'file' else language, [code]))
    for number, (what, blocks) in enumerate(examples, 1):
        if what in ('python', 'console'):
            run = python if what == 'python' else console
            problem = run(tmp_path, blocks if what == 'python' else blocks[0])
            assert problem is None, f'{page.name}, example {number}: {problem[-3000:]}'
        else:
            (tmp_path / what).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / what).write_text(blocks[0])
    if missing:
        pytest.skip(f'all else ran; not installed: {", ".join(missing)}')


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, python: Callable) -> None:
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    code = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    assert code
    assert not any(cell.get('outputs') for cell in cells), 'outputs are not committed'
    problem = python(tmp_path, code)
    assert problem is None, problem[-3000:]


class Parsed(Exception):
    """Ends a tool after its arguments."""


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_all_other_examples_name_what_exists(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, paths = argparse.ArgumentParser.parse_intermixed_args, tools()

    def only_parse(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise Parsed

    for name in ('parse_args', 'parse_intermixed_args'):
        monkeypatch.setattr(argparse.ArgumentParser, name, only_parse)
    monkeypatch.setattr(cli, 'check_device', str)
    for language, code in OTHERS.findall(BLOCK.sub('', page.read_text())):
        if language == 'python':
            ours = (
                n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Import | ast.ImportFrom)
            )
            lines = [
                line for line in map(ast.unparse, ours) if re.search('mmvttt|ttt_kernels', line)
            ]
            exec('\n'.join(lines), {})
        for name, arguments in COMMAND.findall(code.replace('\\\n', ' ')):
            path = paths[tool_name(name)]
            if path.suffix == '.sh':
                # A launcher, whose options are those of tools/train.py and test.py.
                continue
            monkeypatch.setattr('sys.argv', [name, *shlex.split(arguments, comments=True)])
            with pytest.raises(Parsed):
                runpy.run_path(str(path), run_name='__main__')


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_files_that_are_linked_or_named_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in LINK.findall(CODE.sub('', text)) if '://' not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [name for name in FILE.findall(text) if not (ROOT / name).is_file()] == []
