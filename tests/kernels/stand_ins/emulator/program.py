"""Reads PTX: one kernel as a list of decoded instructions."""

import functools
import re
from typing import NamedTuple

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Instruction(NamedTuple):
    predicate: str  # name of the register that switches it on, '' is always
    negated: bool
    name: str  # 'ld'
    modifiers: tuple[str, ...]  # ('global', 'v4', 'b32')
    operands: tuple[str, ...]
    line: int  # of the PTX
    source: int  # of the kernel's Python source, 0 where it is not known
    text: str

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers


class Program(NamedTuple):
    parameters: tuple[tuple[str, int], ...]  # name and bits, in the order of the launch
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    written: frozenset[str]  # registers, somewhere


def parse(ptx: str) -> Program:
    """The only entry of a PTX module."""
    head, _, body = ptx[ptx.index('.visible .entry') :].partition('{')
    parameters = tuple(
        (name, int(bits))
        for bits, name in re.findall(r'\.param \.[a-z](\d+)[^\n]*?(\w+_param_\d+)', head)
    )
    first = ptx[: len(ptx) - len(body)].count('\n') + 1
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    statement, source, start = '', 0, 0
    for number, line in enumerate(body.splitlines(), first):
        line = line.partition('//')[0].strip()
        if location := re.match(r'\.loc\s+\d+\s+(\d+)', line):
            source = int(location[1])
        if label := re.fullmatch(r'(\$\w+):', line):
            labels[label[1]] = len(instructions)
        elif line and not line.startswith('.') and not label:
            start = start if statement else number
            statement += ' ' + line
            *whole, statement = statement.split(';')
            instructions += [
                _decode(text.strip('{ \t'), start, source) for text in whole if text.strip('{} \t')
            ]
            statement = statement.strip(' {}') if not statement.strip(' {}') else statement
        if line == '}' and not statement.strip(' {}'):
            statement = ''
    first_operands = (i.operands[0] for i in instructions if i.operands)
    written = frozenset(part for operand in first_operands for part in elements(operand))
    return Program(parameters, tuple(instructions), labels, written)


def _decode(text: str, line: int, source: int) -> Instruction:
    found = re.match(r'(?:@(!?)(%\w+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)$', text, re.DOTALL)
    if found is None:
        raise ValueError(f'line {line} of the PTX is no instruction: {text!r}')
    negated, predicate, name, modifiers, rest = found.groups()
    # Operands are separated by commas outside of brackets; 'p|q' are two results.
    operands = re.findall(r'(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[\s])+', rest)
    modifiers = tuple(m.split('::')[0] for m in modifiers.split('.') if m)
    return Instruction(
        predicate or '', negated == '!', name, modifiers, tuple(operands), line, source, text
    )


@functools.cache
def elements(operand: str) -> tuple[str, ...]:
    """`{a, b}` as ('a', 'b'); a single operand as one element."""
    return tuple(part.strip() for part in operand.strip('{}').split(','))


@functools.cache
def address(operand: str) -> tuple[str, int]:
    """`[%r1+16]` as ('%r1', 16)."""
    register, _, offset = operand.strip('[] ').replace(' ', '').partition('+')
    return register, int(offset, 0) if offset else 0


@functools.cache
def constant(operand: str, bits: int) -> np.ndarray:
    """An immediate as its bit pattern."""
    if operand.startswith(('0f', '0d')):
        value = int(operand[2:], 16)
    elif operand == 'global_smem':
        value = 0  # shared memory has addresses of its own
    else:
        value = int(operand.removesuffix('U'), 0)
    return np.array([value & ((1 << bits) - 1)], UNSIGNED[bits])
