"""Reads text files that other programs wrote: their size, depth and expansion are bounded."""

from __future__ import annotations

import json
import os
import re
from typing import Any
from xml.etree import ElementTree

import yaml

from mmvttt.errors import DataError

# Bytes: of lists and labels, and of annotations of a whole set (448 MB in COCO's train2017).
_SMALL, _LARGE = 16 * 2**20, 2**30
# Bytes of YAML, whose parser takes 50 µs for each.
_YAML = 2**20
_DEPTH = 64
_ENCODINGS = {b'\xff\xfe': 'utf-16', b'\xfe\xff': 'utf-16'}
_DECLARED = re.compile(rb'<\?xml[^>]*encoding=["\']([\w.-]+)')
# Encodings of two bytes a character, which may be UTF-8 of other characters by chance.
_OF_TWO_BYTES = 'gb', 'big5', 'shift', 'sjis', 'euc', 'cp9', 'ks_c'


def read_text(path: str | os.PathLike[str], largest: int = _SMALL) -> str:
    """The text of a file in UTF-8, with a byte order mark UTF-16, or as its XML declares.

    Raises:
        DataError: It cannot be opened, has more than `largest` bytes, or is not text.
    """
    try:
        with open(path, 'rb') as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise DataError(f'{os.fspath(path)!r} has more than {largest} bytes')
        return _decoded(content)
    except (OSError, UnicodeError, LookupError) as error:
        raise DataError(f'{os.fspath(path)!r} is not text in UTF-8 ({error})') from error


def _decoded(content: bytes) -> str:
    """Text in UTF-8 or -16, else as its XML declares, which may declare what it is not."""
    match = _DECLARED.match(content)
    declared = match[1].decode() if match else 'utf-8'
    if declared.lower().startswith(_OF_TWO_BYTES):
        return content.decode(declared)
    try:
        return content.decode(_ENCODINGS.get(content[:2], 'utf-8-sig'))
    except UnicodeDecodeError:
        return content.decode(declared)


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a file that are not empty, without spaces around them."""
    lines = (line.strip() for line in read_text(path).split('\n'))
    return [line for line in lines if line]


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file. Raises DataError if it is not JSON, or nested too deeply."""
    text = read_text(path, _LARGE)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = 'nested too deeply' if isinstance(error, RecursionError) else error
        raise DataError(f'{os.fspath(path)!r} cannot be read as JSON: {reason}') from error


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Reads a YAML file, each scalar as a str. Raises DataError.

    Aliases (`*name`), which can make a huge document of a few lines, are refused.
    """
    text, depth = read_text(path, _YAML), 0
    try:
        for event in yaml.parse(text, yaml.BaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEPTH:
                raise yaml.YAMLError('it has aliases (*name), or is nested too deeply')
        return yaml.load(text, yaml.BaseLoader)  # noqa: S506, it makes texts, lists and dicts only
    except (yaml.YAMLError, ValueError) as error:
        reason = ' '.join(str(error).split())
        raise DataError(f'{os.fspath(path)!r} cannot be read as YAML: {reason}') from error


def read_xml(path: str | os.PathLike[str]) -> ElementTree.Element:
    """The root of a file of XML; raises DataError, also if it defines entities."""
    text = read_text(path, _LARGE)
    if '<!DOCTYPE' in text or '<!ENTITY' in text:
        raise DataError(f'{os.fspath(path)!r} defines entities: remove its DOCTYPE')
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise DataError(f'{os.fspath(path)!r} cannot be read as XML: {error}') from error
