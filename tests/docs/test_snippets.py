"""The examples in the documents run: every block that a comment marks, in order, page by page.

`<!-- run -->` before a block runs it: Python in one namespace for the page, a console block line by
line. `<!-- run: file NAME -->` writes the block to a file for the blocks after it, and
`<!-- run: with PACKAGE -->` runs it where the package is installed.
"""

import os
import pkgutil
import re
import subprocess
import sys
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

import pytest
from mmengine.registry import DefaultScope

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
BLOCK = re.compile(r'<!-- run(?:: (file|with) (\S+))? -->\n```(\w+)\n(.*?)```', re.DOTALL)
LINK = re.compile(r'\]\(([^)#]+)\)')
CODE = re.compile(r'```.*?```', re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 10
    for page in PAGES:
        text = page.read_text()
        # A marker that the pattern misses would be an example that does not run.
        assert text.count('<!-- run') == len(BLOCK.findall(text)), page.name


@pytest.mark.parametrize(
    'page', [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.stem
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A user's Python has no default scope that a training has left behind.
    monkeypatch.setattr(DefaultScope, '_instance_dict', OrderedDict())
    for name in ('tools', 'configs'):
        (tmp_path / name).symlink_to(ROOT / name)
    # `python` of the examples is the one that runs the tests.
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    namespace: dict = {'__name__': page.stem}
    missing = []
    for number, (kind, name, language, code) in enumerate(BLOCK.findall(page.read_text()), 1):
        if kind == 'file':
            Path(name).write_text(code)
        elif kind == 'with' and find_spec(name) is None:
            missing.append(name)
        elif language == 'python':
            exec(compile(code, f'{page.name}, example {number}', 'exec'), namespace)
        else:
            assert language == 'console', f'{page.name}: {language!r} blocks cannot run'
            done = subprocess.run(
                ['bash', '-euc', code],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, 'PATH': path},
            )
            assert done.returncode == 0, f'{page.name}, example {number}: {done.stderr}'
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
