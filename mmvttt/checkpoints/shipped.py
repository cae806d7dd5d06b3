"""The weights that come with mmvttt: small classifiers by name, found without a network."""

from pathlib import Path

from ..errors import CheckpointMissingError

SCHEME = 'mmvttt://'
_FOLDER = Path(__file__).with_name('weights')


def shipped_names() -> list[str]:
    """Names of the weights that come with mmvttt, equal to the names of their configs."""
    return sorted(_files())


def shipped_file(name: str) -> Path:
    """The file of shipped weights, for `name` or `mmvttt://name`; else a CheckpointMissingError."""
    files = _files()
    short = name.removeprefix(SCHEME)
    if short not in files:
        names = ', '.join(f'{SCHEME}{name_of_file}' for name_of_file in sorted(files))
        raise CheckpointMissingError(
            f'no weights {short!r} come with mmvttt; there are: {names or "none"}. Give one of '
            'these names, or a file'
        )
    return files[short]


def _files() -> dict[str, Path]:
    # `publish_checkpoint` puts the first digits of the hash behind the name.
    return {path.stem.rpartition('-')[0]: path for path in _FOLDER.glob('*-*.safetensors')}
