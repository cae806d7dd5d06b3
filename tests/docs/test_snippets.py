"""The examples in the documents run: every block that a comment marks, page by page.

`<!-- run -->` before a block runs it: Python alone, in a process that has imported nothing of ours,
a console block line by line. `<!-- run: more -->` continues the block above.
`<!-- run: file NAME -->` writes the block to a file for the blocks after it, and
`<!-- run: with PACKAGE -->` runs it where the package is installed.
"""

import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
BLOCK = re.compile(r'<!-- run(?:: (file|with|more)(?: (\S+))?)? -->\n```(\w+)\n(.*?)```', re.DOTALL)
LINK = re.compile(r'\]\(([^)#]+)\)')
CODE = re.compile(r'```.*?```', re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 10
    for page in PAGES:
        text = page.read_text()
        # A marker that the pattern misses would be an example that does not run.
        assert text.count('<!-- run') == len(BLOCK.findall(text)), page.name


# Runs blocks of Python, each list in a process of its own. What they all import is imported once.
RUNNER = """
import json, os, sys, traceback
import timm, torch
for number, blocks in json.load(sys.stdin):
    child = os.fork()
    if not child:
        try:
            namespace = {'__name__': 'snippet'}
            for code in blocks:
                exec(compile(code, f'example {number}', 'exec'), namespace)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f'example {number} failed')
"""


@pytest.mark.parametrize(
    'page', [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.stem
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    for name in ('tools', 'configs'):
        (tmp_path / name).symlink_to(ROOT / name)
    # `python` of the examples is the one that runs the tests.
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'

    def run(command: list[str], number: int, stdin: str = '') -> None:
        done = subprocess.run(
            command,
            input=stdin,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, 'PATH': path},
        )
        assert done.returncode == 0, f'{page.name}, example {number}: {done.stderr[-3000:]}'

    missing: list[str] = []
    waiting: list[tuple[int, list[str]]] = []
    for number, (kind, name, language, code) in enumerate(BLOCK.findall(page.read_text()), 1):
        if kind == 'more':
            waiting[-1][1].append(code)
        elif kind == 'file' or language != 'python':
            # They may overwrite a file, or need what a block before them has written.
            if waiting:
                run([sys.executable, '-c', RUNNER], number, json.dumps(waiting))
                waiting = []
            if kind == 'file':
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(code)
            else:
                assert language == 'console', f'{page.name}: {language!r} blocks cannot run'
                run(['bash', '-euc', code], number)
        elif kind == 'with' and find_spec(name) is None:
            missing.append(name)
        else:
            waiting.append((number, [code]))
    if waiting:
        run([sys.executable, '-c', RUNNER], waiting[-1][0], json.dumps(waiting))
    if missing:
        pytest.skip(f'all else ran; not installed: {", ".join(missing)}')


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in LINK.findall(CODE.sub('', page.read_text())) if '://' not in link]
    missing = [link for link in targets if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_tools_and_configs_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r'\b((?:tools|configs)/[\w/]+\.(?:py|sh|yml))', page.read_text()))
    missing = sorted(name for name in named if not (ROOT / name).is_file())
    assert not missing


def test_the_reference_names_what_exists() -> None:
    """Without building the site."""
    for page in (ROOT / 'docs/reference').glob('*.md'):
        for name in re.findall(r'^::: (\S+)', page.read_text(), re.MULTILINE):
            pkgutil.resolve_name(name)


def test_every_tool_is_listed() -> None:
    page = (ROOT / 'docs' / 'organisation.md').read_text()
    tools = {p.name for s in ('*.py', '*.sh') for p in (ROOT / 'tools').glob(s)}
    missing = {name for name in tools if not name.startswith('_') and f'`{name}`' not in page}
    assert not missing, 'name them in docs/organisation.md, "The tools"'
