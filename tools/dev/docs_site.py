"""Hook of mkdocs: adds the READMEs of the ops, the configs and the README's screen to the site."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Files, config: Any) -> Files:
    """Adds `kernels/<op>.md` and `configs/<name>.py`."""
    for path in sorted(ROOT.glob('kernels/*/README.md')):
        files.append(_file(config, f'kernels/{path.parent.name}.md', path))
    for path in sorted(ROOT.glob('configs/*.py')):
        files.append(_file(config, f'configs/{path.name}', path))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrites links of the repository to links of the site, named by the page's title."""
    if page.file.src_uri == 'index.md':
        markdown = first_screen() + markdown.split('\n', 4)[4]
    folder = Path(page.file.abs_src_path or '').parent
    markdown = re.sub(r'\[[\w./]+\.md\]\(([\w./]+\.md)', partial(_titled, folder), markdown)
    # Links from a page of docs/, and from one op's README to another's.
    markdown = re.sub(r'\]\(\.\./kernels/(\w+)/README\.md\)', r'](kernels/\1.md)', markdown)
    markdown = re.sub(r'\]\(\.\./(\w+)/README\.md\)', r'](\1.md)', markdown)
    # From an op's README to a file of docs/.
    markdown = re.sub(r'\]\(\.\./\.\./docs/', '](../', markdown)
    # Pygments takes console lines without a prompt for output.
    return markdown.replace('](../configs/', '](configs/').replace('```console', '```sh')


def first_screen() -> str:
    """The README down to its tables, with links from docs/."""
    screen = (ROOT / 'README.md').read_text(encoding='utf-8').partition('| You want')[0]
    return screen.replace('](docs/', '](')


def on_post_build(config: Any) -> None:
    """Writes the pages as .md, and llms.txt, which lists them for language models."""
    site = Path(config.site_dir)
    lines = ['# mmvttt', '', f'> {config.site_description}', '']
    for path in sorted((ROOT / 'docs').glob('*.md')):
        text = path.read_text(encoding='utf-8')
        if path.name == 'index.md':
            text = (ROOT / 'README.md').read_text(encoding='utf-8').replace('](docs/', '](')
        (site / path.name).write_text(text, encoding='utf-8')
        lines.append(f'- [{text.partition(chr(10))[0].lstrip("# ")}]({path.name})')
    (site / 'llms.txt').write_text('\n'.join(lines) + '\n', encoding='utf-8')


def _titled(folder: Path, link: re.Match) -> str:
    with open(folder / link[1], encoding='utf-8') as page:
        return f'[{page.readline().lstrip("# ").strip()}]({link[1]}'


def _file(config: Any, name: str, path: Path) -> File:
    return File.generated(config, name, abs_src_path=str(path))
