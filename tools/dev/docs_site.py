"""Hook of mkdocs: adds the READMEs of the ops and the configs to the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Files, config: Any) -> Files:
    """Adds `kernels/<op>.md` and `configs/<name>.py`."""
    for path in sorted(ROOT.glob('kernels/*/README.md')):
        files.append(_file(config, f'kernels/{path.parent.name}.md', path))
    for path in sorted(ROOT.glob('configs/*.py')):
        files.append(_file(config, f'configs/{path.name}', path))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrites links of the repository to links of the site."""
    # Links from a page of docs/, and from one op's README to another's.
    markdown = re.sub(r'\]\(\.\./kernels/(\w+)/README\.md\)', r'](kernels/\1.md)', markdown)
    markdown = re.sub(r'\]\(\.\./(\w+)/README\.md\)', r'](\1.md)', markdown)
    return markdown.replace('](../configs/', '](configs/')


def _file(config: Any, name: str, path: Path) -> File:
    return File.generated(config, name, abs_src_path=str(path))
