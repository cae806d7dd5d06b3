"""Downloads files: once for all processes, resumed where a transfer broke, whole or not at all.

`huggingface_hub`'s `http_get` does much of this, but it is not public, logs addresses with the
tokens in their queries, and keeps nothing of a transfer that was interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import stat
import sys
import time
from base64 import b64encode
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from tqdm import tqdm

from ..errors import CheckpointError
from .atomic_write import PARTIAL, write_whole
from .locks import locked

_log = logging.getLogger(__name__)
_SECONDS_TO_ANSWER = 60
_TRIES = 3
_PIECE = 2**20
_NOFOLLOW = getattr(os, 'O_NOFOLLOW', 0)
# The digest that torch's convention puts into the name of a file.
_NAMED = re.compile(r'-([a-f0-9]{8,64})\.')
_PAGE = re.compile(rb'\s*<(!doctype html|html|head|\?xml)', re.IGNORECASE)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class _Broken(ConnectionError):
    """A transfer that ended early."""


def shown(source: str) -> str:
    """A path or URL for messages: without user, password and query, which may hold a token."""
    if not re.match(r'(https?|ftps?|sftp)://', source):
        return source
    parts = urlsplit(source)
    # One digit is no token.
    query = parts.query if re.fullmatch(r'\w+=\d', parts.query) else '…' if parts.query else ''
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2], query=query))


def cache() -> Path:
    """The folder of downloads, torch's: TORCH_HOME decides, or `torch.hub.set_dir`."""
    if torch := sys.modules.get('torch'):
        return Path(torch.hub.get_dir(), 'checkpoints')
    # As torch has it, whose import takes seconds.
    default = Path(os.environ.get('XDG_CACHE_HOME', '~/.cache'), 'torch')
    return Path(os.environ.get('TORCH_HOME', default), 'hub', 'checkpoints').expanduser()


def download(url: str, path: Path) -> None:
    """Downloads a file to `path`, beside which its digest is kept.

    A bar on stderr shows the progress. Other processes wait, and find the file. Its digest is
    compared with the first digits in its name, if it has any.

    Raises:
        CheckpointError: It cannot be downloaded or written, or is not what it should be.
    """
    remedy = f'On a machine without a network put the file there as {os.fspath(path)!r}'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(path.with_name(f'.{path.name}.lock'))
        try:
            if path.is_file():
                return
            _log.info('downloading %s to %s', shown(url), path)
            partial = _transferred(url, path)
            digest = file_digest(partial)
            if not digest.startswith(expected := named_digest(path.name)):
                partial.unlink()
                raise CheckpointError(
                    f'{shown(url)!r} is not the file that it should be: its digest is {digest}, '
                    f'not {expected}'
                )
            write_whole(_record(path), f'{digest}  {path.name}\n'.encode())
            os.replace(partial, path)
        finally:
            lock.release()
    except CheckpointError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        number = getattr(error, 'errno', None)
        if number in _FULL:
            remedy = 'The disk is full: set TORCH_HOME to a folder with more space'
        elif number in _FORBIDDEN:
            remedy = 'Set TORCH_HOME to a folder that can be written'
        raise CheckpointError(f'{shown(url)!r} cannot be downloaded: {error}. {remedy}') from error


def kept_digest(path: Path) -> str:
    """The digest that was kept when a file was downloaded, or that its name has, or ''."""
    record = _record(path)
    return record.read_text()[:64] if record.is_file() else named_digest(path.name)


def named_digest(name: str) -> str:
    """The digest in a file's name, by torch's convention. Eight decimals are a date or a run."""
    match = _NAMED.search(name)
    return match[1] if match and not re.fullmatch(r'\d{8}', match[1]) else ''


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _record(path: Path) -> Path:
    return path.with_name(f'.{path.name}.sha256')


def _transferred(url: str, path: Path) -> Path:
    """The whole file under a temporary name. A broken transfer is tried again from its end."""
    for left in reversed(range(_TRIES)):
        try:
            return _transfer(url, path)
        except (HTTPException, TimeoutError, ConnectionError, URLError) as error:
            if not left or (isinstance(error, HTTPError) and error.code < 500):
                raise
            _log.info('%s: %s; trying again', shown(url), error)
            time.sleep(1)
    raise AssertionError


def _transfer(url: str, path: Path) -> Path:
    with urlopen(_request(url), timeout=_SECONDS_TO_ANSWER) as answer:
        headers = answer.headers
        version = headers.get('ETag') or headers.get('Last-Modified')
        # Parts of another version of the file have another name.
        about = f'{version}{headers.get("Content-Length")}'.encode()
        mark = hashlib.sha256(about).hexdigest()[:16]
        partial = path.with_name(f'.{path.name}.{mark}{PARTIAL}')
        there = partial.lstat() if os.path.lexists(partial) else None
        if there and not (version and stat.S_ISREG(there.st_mode) and there.st_nlink == 1):
            # A link may have been planted to have its target overwritten.
            partial.unlink()
            there = None
        if not there or not 0 < there.st_size < int(headers.get('Content-Length') or 0):
            return _written(answer, url, partial, 0)
    request = _request(url)
    request.add_header('Range', f'bytes={there.st_size}-')
    request.add_header('If-Range', str(version))
    with urlopen(request, timeout=_SECONDS_TO_ANSWER) as answer:
        return _written(answer, url, partial, there.st_size if answer.status == 206 else 0)


def _written(answer: HTTPResponse, url: str, partial: Path, start: int) -> Path:
    """Appends an answer to what is there of a file, from its byte `start` on."""
    flags = os.O_WRONLY | os.O_CREAT | _NOFOLLOW
    length = answer.headers.get('Content-Length')
    total = start + int(length) if length else None
    bar = tqdm(total=total, initial=start, unit='B', unit_scale=True, disable=None)
    bar.set_description(partial.name.split(PARTIAL)[0][1:-17])
    with open(os.open(partial, flags, 0o666), 'wb') as file, bar:
        file.truncate(start)
        file.seek(start)
        while piece := answer.read(_PIECE):
            if file.tell() == 0 and _PAGE.match(piece):
                partial.unlink()
                raise CheckpointError(
                    f'{shown(url)!r} is a web page and not a file: give the address of the file '
                    'itself, or download it in a browser and give its path'
                )
            file.write(piece)
            bar.update(len(piece))
        if total is not None and file.tell() != total:
            raise _Broken(f'{file.tell()} of {total} bytes came')
        os.fsync(file.fileno())
    return partial


def _request(url: str) -> Request:
    """A request for a URL, whose user and password are sent as HTTP wants them."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition('@')
    request = Request(urlunsplit(parts._replace(netloc=host)))
    if user:
        token = b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header('Authorization', f'Basic {token}')
    return request
