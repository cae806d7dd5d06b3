"""A wheel holds every module, config and tool, and nothing that only work on mmvttt needs."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def sources(folder: str, pattern: str = '*') -> set[str]:
    files = (p.relative_to(ROOT) for p in (ROOT / folder).rglob(pattern) if p.is_file())
    return {str(p) for p in files if '__pycache__' not in p.parts and '.mim' not in p.parts}


def test_every_module_config_and_tool_is_in_it(wheel_files: set[str]) -> None:
    tools = {p for p in sources('tools') if not p.startswith('tools/dev/')}
    expected = {f'mmvttt/.mim/{p}' for p in tools | sources('configs') | {'model-index.yml'}}
    expected |= sources('mmvttt', '*.py') | {'mmvttt/py.typed', 'ttt_kernels/py.typed'}
    expected |= sources('mmvttt/checkpoints/weights')
    expected |= {f'ttt_{p}' for p in sources('kernels', '*.py')}
    assert wheel_files == expected | {'mmvttt.pth', 'mmvttt_startup.py'}
