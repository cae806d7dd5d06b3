"""Waits until all nodes of a training are there, and prints which are missing: see _torchrun.sh.

torchrun waits too, for minutes and without a line, also for a node that was given another's number.

usage: python tools/_rendezvous.py NNODES NODE_RANK MASTER_ADDR PORT
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

_PRINT_EVERY = float(os.environ.get('NODES_SAY_EVERY', '30'))
_END_AFTER = float(os.environ.get('NODES_TIMEOUT', '900'))


class RendezvousError(Exception):
    """The nodes cannot train together."""


class _Clock:
    """Ends a wait in time, and prints its reason every half a minute."""

    def __init__(self) -> None:
        self.end = time.monotonic() + _END_AFTER
        self.next = time.monotonic() + _PRINT_EVERY

    def tick(self, what: str) -> None:
        now = time.monotonic()
        if now > self.end:
            raise RendezvousError(f'{what} for {_END_AFTER:.0f} s; NODES_TIMEOUT sets another time')
        if now > self.next:
            self.next = now + _PRINT_EVERY
            print(f'{what} …', file=sys.stderr, flush=True)


def rendezvous(nodes: int, rank: int, address: str, port: int) -> None:
    """Waits until all nodes are there.

    Raises:
        RendezvousError: They are not, after a while; or two have one number.
    """
    if not 0 <= rank < nodes:
        raise RendezvousError(f'NODE_RANK={rank} is none of 0 to {nodes - 1} of NNODES={nodes}')
    if rank == 0:
        _host(nodes, address, port)
    else:
        _join(nodes, rank, address, port)


def _host(nodes: int, address: str, port: int) -> None:
    clock, there = _Clock(), {0: (socket.gethostname(), None)}
    try:
        server = socket.create_server(('', port), backlog=nodes)
    except OSError as error:
        raise RendezvousError(
            f'port {port} cannot be opened on this node ({error.strerror}): set another PORT on '
            'all nodes'
        ) from None
    with server:
        server.settimeout(0.2)
        try:
            while len(there) < nodes:
                missing = ', '.join(str(n) for n in range(nodes) if n not in there)
                clock.tick(f'waiting for NODE_RANK {missing} of {nodes} nodes at {address}:{port}')
                try:
                    connection, _ = server.accept()
                    connection.settimeout(5)
                    with connection.makefile() as lines:
                        hello = json.loads(lines.readline())
                    number, host, count = int(hello['rank']), str(hello['host']), hello['nodes']
                except (OSError, ValueError, KeyError, TypeError):
                    # Another program that connects to the port.
                    continue
                former = there.get(number)
                # The node with the wrong number is told too.
                there[-1 if former else number] = host, connection
                if count != nodes:
                    raise RendezvousError(
                        f'NNODES is {nodes} on {there[0][0]!r}, {count} on {host!r}'
                    )
                if former:
                    raise RendezvousError(
                        f'NODE_RANK={number} was given twice: to {former[0]!r} and {host!r}'
                    )
            _tell(there, '')
        except RendezvousError as error:
            _tell(there, str(error))
            raise


def _tell(there: dict[int, tuple[str, socket.socket | None]], error: str) -> None:
    for _, connection in there.values():
        if connection is not None:
            with connection:
                connection.sendall(json.dumps(error).encode() + b'\n')


def _join(nodes: int, rank: int, address: str, port: int) -> None:
    clock = _Clock()
    hello = json.dumps({'rank': rank, 'host': socket.gethostname(), 'nodes': nodes})
    while True:
        clock.tick(f'waiting for the first node (NODE_RANK=0) at {address}:{port}')
        try:
            with socket.create_connection((address, port), timeout=5) as connection:
                connection.sendall(hello.encode() + b'\n')
                answer = b''
                connection.settimeout(0.2)
                while not answer.endswith(b'\n'):
                    clock.tick('waiting for the other nodes')
                    try:
                        piece = connection.recv(4096)
                    except TimeoutError:
                        continue
                    if not piece:
                        raise ConnectionResetError
                    answer += piece
            break
        except OSError:
            time.sleep(0.5)
    error = json.loads(answer)
    if error:
        raise RendezvousError(error)


if __name__ == '__main__':
    try:
        rendezvous(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    except (RendezvousError, ValueError) as error:
        raise SystemExit(f'error: {error}') from None
