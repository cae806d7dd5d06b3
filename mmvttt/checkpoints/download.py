"""Downloads files: once for all processes, resumed where a transfer broke, whole or not at all.

`huggingface_hub`'s `http_get` does much of this, but it is not public, logs addresses with the
tokens in their queries, and takes a partial answer for the part that it asked for. pooch resumes
no transfer.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
import stat
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from tqdm import tqdm

from ..errors import CheckpointError
from .atomic_write import NOFOLLOW, PARTIAL, write_whole
from .locks import locked

_log = logging.getLogger(__name__)
_SECONDS_TO_ANSWER = 60
# Transfers in turn that bring nothing, and the longest wait that a server may ask for.
_TRIES, _LONGEST_WAIT = 3, 120.0
_PIECE = 2**20
# After these, the time for a transfer is said.
_FIRST_SECONDS = 3
# The digest that torch's convention puts into the name of a file.
_NAMED = re.compile(r'-([a-f0-9]{8,64})\.')
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_ENTRY = 'It wants a user or a token: download it in a browser, and give its path'
_ADVICE = {
    401: _NO_ENTRY,
    403: _NO_ENTRY,
    404: 'Compare the address with its page',
    410: 'It is gone',
}


class _Broken(ConnectionError):
    """A transfer that ended early."""


def without_secrets(source: str) -> str:
    """A path or URL for messages: without user, password and query, which may hold a token."""
    if not re.match(r'(https?|ftps?|sftp)://', source):
        return source
    if _is_ambiguous(source):
        return f'{source.partition("://")[0]}://…@{source.rpartition("@")[2].partition("?")[0]}'
    parts = urlsplit(source)
    # One digit is no token.
    query = parts.query if re.fullmatch(r'\w+=\d', parts.query) else '…' if parts.query else ''
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2], query=query))


def _is_ambiguous(url: str) -> bool:
    """Whether a URL's password has a character that ends the host, such as `user:a/b@host`."""
    host, _, rest = re.sub('[/?#]', '\n', url.partition('://')[2], count=1).partition('\n')
    port = host.rpartition(':')[2]
    return '@' in rest and '@' not in host and ':' in host and not re.fullmatch(r'\d*|.*\]', port)


def cache() -> Path:
    """The folder of downloads, torch's: TORCH_HOME decides, or `torch.hub.set_dir`."""
    if torch := sys.modules.get('torch'):
        return Path(torch.hub.get_dir(), 'checkpoints')
    # As torch has it, whose import takes seconds.
    default = Path(os.environ.get('XDG_CACHE_HOME', '~/.cache'), 'torch')
    return Path(os.environ.get('TORCH_HOME', default), 'hub', 'checkpoints').expanduser()


def download(
    url: str,
    path: Path,
    problem: Callable[[Path], str | None] = lambda path: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Downloads a file to `path`, beside which its digest is kept.

    A bar on stderr shows the progress. Other processes wait, and find the file. Its digest is
    compared with the first digits in its name, if it has any.

    Args:
        url: Where it is.
        path: Where it will be.
        problem: Says why a file that came must not be kept, or None.
        say: Gets the size before the transfer, and the time for it after its first seconds.

    Raises:
        CheckpointError: It cannot be downloaded or written, or is not what it should be.
    """
    address = without_secrets(url)
    remedy = f'On a machine without a network put the file there as {os.fspath(path)!r}'
    if _is_ambiguous(url):
        raise CheckpointError(f'{address!r} has a / ? or # in its password: write %2F %3F %23')
    if os.environ.get('HF_HUB_OFFLINE', '0').upper() in ('1', 'ON', 'YES', 'TRUE'):
        raise CheckpointError(f'{address!r} is not downloaded, by HF_HUB_OFFLINE. {remedy}')
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(path.with_name(f'.{path.name}.lock'))
        if path.is_file():
            return
        _log.info('downloading %s to %s', address, path)
        partial = _transferred(url, path, say)
        digest = file_digest(partial)
        fault = problem(partial)
        if not digest.startswith(expected := named_digest(path.name)):
            fault = f'is not the file that it should be: its digest is {digest}, not {expected}'
        if fault:
            partial.unlink()
            raise CheckpointError(
                f'{address!r} {fault}, and was not kept: give the address of the file itself, '
                f'or download it in a browser and put it there as {os.fspath(path)!r}'
            )
        changed = partial.stat().st_mtime_ns
        write_whole(_record(path), f'{digest}  {path.name}\n{changed}\n'.encode())
        os.replace(partial, path)
        # Parts of files from other addresses, or of other versions.
        for part in path.parent.glob(f'.{glob.escape(path.name)}.*{PARTIAL}'):
            part.unlink(missing_ok=True)
    except CheckpointError:
        raise
    except HTTPError as error:
        advice = _ADVICE.get(error.code, 'Try again later')
        raise CheckpointError(f'{address!r}: the server says {error}. {advice}') from error
    except (OSError, HTTPException, ValueError) as error:
        number = getattr(error, 'errno', None)
        if number in _FULL:
            remedy = 'The disk is full: set TORCH_HOME to a folder with more space'
        elif number in _FORBIDDEN:
            remedy = 'Set TORCH_HOME to a folder that can be written'
        raise CheckpointError(f'{address!r} cannot be downloaded: {error}. {remedy}') from error
    finally:
        if lock is not None:
            lock.release()


def is_damaged(path: Path) -> str:
    """The digest that a file should have, if it has another one; else ''.

    A file that was written since its download, and that has no digest in its name, is somebody's
    own: this is logged, and its record goes.
    """
    record, expected = _record(path), named_digest(path.name)
    lines = record.read_text(errors='replace').split('\n') if record.is_file() else []
    if not (expected := expected or ''.join(lines[:1])[:64]):
        return ''
    if file_digest(path).startswith(expected):
        return ''
    if not named_digest(path.name) and lines[1:2] != [str(path.stat().st_mtime_ns)]:
        _log.warning('%s is not the file that was downloaded: it is taken as it is', path)
        record.unlink()
        return ''
    return expected


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


def _transferred(url: str, path: Path, say: Callable[[str], None]) -> Path:
    """The whole file under a temporary name. A broken transfer continues from its end.

    The tries are counted again when bytes have come.
    """
    failures, most = 0, -1
    while True:
        try:
            return _transfer(url, path, say)
        except (HTTPException, TimeoutError, ConnectionError, URLError) as error:
            parts = path.parent.glob(f'.{glob.escape(_part(url, path))}.*{PARTIAL}')
            size = max((part.stat().st_size for part in parts), default=0)
            failures, most = 1 if size > most else failures + 1, max(most, size)
            code = error.code if isinstance(error, HTTPError) else 500
            if failures >= _TRIES or (code < 500 and code not in (408, 425, 429)):
                raise
            seconds = _retry_after(error) or failures
            _log.warning('%s: %s; trying again in %.0f s', without_secrets(url), error, seconds)
            time.sleep(seconds)


def _retry_after(error: Exception) -> float | None:
    """The seconds that a busy server asks to wait, at most `_LONGEST_WAIT`."""
    text = error.headers.get('Retry-After') if isinstance(error, HTTPError) else None
    try:
        seconds = float(text or '')
    except ValueError:
        try:
            until = parsedate_to_datetime(text or '')
        except (TypeError, ValueError):
            return None
        seconds = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.1), _LONGEST_WAIT)


def _part(url: str, path: Path) -> str:
    """The beginning of the name of a file's part, behind a dot."""
    return f'{path.name}.{hashlib.sha256(url.encode()).hexdigest()[:12]}'


def _version(headers: Message) -> str:
    """A mark that another version of a file has another one of; '' if the server has none.

    Some servers say the time of the answer in Last-Modified.
    """
    dates = [headers.get(name) or '' for name in ('Last-Modified', 'Date')]
    if headers.get('ETag'):
        return str(headers['ETag'])
    try:
        modified, now = map(parsedate_to_datetime, dates)
        return dates[0] if (now - modified).total_seconds() > 60 else ''
    except (TypeError, ValueError):
        return ''


def _transfer(url: str, path: Path, say: Callable[[str], None]) -> Path:
    with urlopen(_request(url), timeout=_SECONDS_TO_ANSWER) as answer:
        length, version = answer.headers.get('Content-Length'), _version(answer.headers)
        about = f'{length}.{hashlib.sha256(version.encode()).hexdigest()[:8]}'
        partial = path.with_name(f'.{_part(url, path)}.{about}{PARTIAL}')
        there = partial.lstat() if os.path.lexists(partial) else None
        if there and not (length and stat.S_ISREG(there.st_mode) and there.st_nlink == 1):
            # A link may have been planted to have its target overwritten.
            partial.unlink()
            there = None
        if there and there.st_size == int(length or 0):
            return partial
        if not there or not 0 < there.st_size < int(length or 0):
            return _written(answer, partial, 0, say)
    request = _request(url)
    request.add_header('Range', f'bytes={there.st_size}-')
    if version:
        request.add_header('If-Range', version)
    with urlopen(request, timeout=_SECONDS_TO_ANSWER) as answer:
        asked = rf'bytes {there.st_size}-{int(length or 0) - 1}/({length}|\*)'
        right = re.fullmatch(asked, answer.headers.get('Content-Range') or '')
        if answer.status == 206 and right and version == _version(answer.headers):
            return _written(answer, partial, there.st_size, say)
    # From the beginning: the server has another version, or sends another part.
    partial.unlink()
    return _transfer(url, path, say)


def _written(answer: HTTPResponse, partial: Path, start: int, say: Callable[[str], None]) -> Path:
    """Appends an answer to what is there of a file, from its byte `start` on."""
    flags = os.O_WRONLY | os.O_CREAT | NOFOLLOW
    length = answer.headers.get('Content-Length')
    total = start + int(length) if length else None
    bar = tqdm(total=total, initial=start, unit='B', unit_scale=True, disable=None)
    bar.set_description(partial.name.rsplit('.', 4)[0][1:])
    if total is not None:
        say(f'{(total - start) / 1e6:.3g} MB to download')
    begin, rated = time.monotonic(), False
    with open(os.open(partial, flags, 0o666), 'wb') as file, bar:
        file.truncate(start)
        file.seek(start)
        # `read1` returns the bytes that have arrived, so that an interrupt keeps them.
        while piece := answer.read1(_PIECE):
            file.write(piece)
            bar.update(len(piece))
            seconds, come = time.monotonic() - begin, file.tell() - start
            if total is not None and not rated and seconds > _FIRST_SECONDS:
                say(f'in about {seconds * (total - start) / come / 60:.1f} minutes')
                rated = True
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
