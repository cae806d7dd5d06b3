"""Starts several nodes on this machine, each a group of processes of tools/dist_train.sh."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

TOOLS = Path(__file__).parents[2] / 'tools'
# Where the modules lie that configs of tests import.
TESTS = TOOLS.parent / 'tests'
_MARK = 'MMVTTT_TEST_NODE'
_LAUNCHER = ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT', 'RDZV_ID', 'LOCAL_ADDR')
_WORKER = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT', 'GROUP_WORLD_SIZE')


@dataclass(frozen=True)
class Node:
    """One group of processes, as one machine of a run would have it."""

    process: subprocess.Popen
    output: Path
    mark: str

    def text(self) -> str:
        """Output of the launcher and the ranks."""
        return self.output.read_text(errors='replace')

    def wait_for(self, words: str, seconds: float = 150) -> None:
        """Waits until its output has some words."""
        end = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < end, f'no {words!r} in {seconds} s:\n{self.text()[-4000:]}'
            assert self.process.poll() is None, self.text()[-4000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends the launcher and all that it started: torchrun gives every rank its own session."""
        for environment in Path('/proc').glob('[0-9]*/environ'):
            # A process may end between listing and reading.
            with contextlib.suppress(OSError):
                if f'{_MARK}={self.mark}'.encode() in environment.read_bytes().split(b'\0'):
                    os.kill(int(environment.parent.name), signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Ended:
    """Exit status of a node's launcher, None if it had to be killed, and what it has written."""

    status: int | None
    text: str


def free_port() -> str:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return str(probe.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, fit for a rank on the loopback device, with `variables`."""
    clean = {k: v for k, v in os.environ.items() if k not in (*_LAUNCHER, *_WORKER)}
    own = [str(TESTS / name) for name in ('dist', 'trainings')]
    paths = [*own, *filter(None, [clean.get('PYTHONPATH')])]
    clean.update(PYTHON=sys.executable, OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(paths))
    if 'lo' in {name for _, name in socket.if_nameindex()}:
        clean['GLOO_SOCKET_IFNAME'] = 'lo'
    return {**clean, **variables}


def start_node(command: Sequence[str], output: Path, **variables: str) -> Node:
    """Starts a command in its own session; what it writes goes to a file."""
    mark = uuid.uuid4().hex
    with output.open('wb') as sink:
        process = subprocess.Popen(
            [*map(str, command)],
            env=environment(**variables, **{_MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Node(process, output, mark)


def start_nodes(
    config: Path,
    folder: Path,
    *args: str,
    nodes: int = 2,
    processes: int = 2,
    ranks: bool = True,
    each: Sequence[Sequence[str]] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Node]:
    """Starts tools/dist_train.sh on every node, as its user would.

    Args:
        config: What to train, by train.py with `args` and the arguments of `each` node.
        folder: Where node i's output goes, to `node_i.log`; made if missing.
        nodes: How many, with so many `processes` each; one starts as `dist_train.sh` alone does.
        ranks: Whether nodes are told their NODE_RANK, or find each other by c10d rendezvous.
        variables: Added to the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = {'MASTER_ADDR': '127.0.0.1', 'PORT': free_port(), **(variables or {})}
    started = []
    for rank, own in enumerate(each or [()] * nodes):
        where = {'NODE_RANK': str(rank)} if ranks else {'LOCAL_ADDR': '127.0.0.1'}
        many = {'NNODES': str(nodes), **where} if nodes > 1 else {}
        command = ['bash', TOOLS / 'dist_train.sh', config, str(processes), *args, *own]
        started.append(start_node(command, folder / f'node_{rank}.log', **common, **many))
    return started


def wait(nodes: Sequence[Node], timeout: float = 400, grace: float = 45) -> list[Ended]:
    """Waits for all nodes, the others for `grace` seconds after one fails; kills what is left."""
    ends: dict[Node, Ended] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(ends) < len(nodes) and time.monotonic() < deadline:
            for node in nodes:
                status = node.process.poll()
                if status is not None and node not in ends:
                    ends[node] = Ended(status, node.text())
                    if status:
                        deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.1)
    finally:
        for node in nodes:
            node.kill()
    return [ends.get(node) or Ended(None, node.text()) for node in nodes]


def run_script(script: Path, output: Path, *args: object, processes: int = 2) -> str:
    """Output of a script on some ranks of this machine, started as the tools do."""
    code = f'source "{TOOLS}/_torchrun.sh"; run_distributed "$@"'
    command = ['bash', '-c', code, 'bash', script, processes, *args]
    (end,) = wait([start_node(command, output)])
    assert end.status == 0, end.text[-6000:]
    return end.text


def run_nodes(config: Path, folder: Path, *args: str, **options: object) -> list[str]:
    """`start_nodes`, and the output of every node once all of them have ended well."""
    ends = wait(start_nodes(config, folder, *args, **options))
    for rank, end in enumerate(ends):
        assert end.status == 0, f'node {rank} ended with {end.status}:\n{end.text[-6000:]}'
    return [end.text for end in ends]


def kept(work_dir: Path, ranks: int) -> list[dict]:
    """Records of the hook `Keep` on every rank."""
    return [torch.load(work_dir / f'rank_{r}.pth', weights_only=True) for r in range(ranks)]


def require_same_from(step: int, whole: list[dict], rest: list[dict]) -> None:
    """Every rank of a resumed run has the samples, losses and weights of the undisturbed one."""
    for before, after in zip(whole, rest, strict=True):
        assert after['seen'] == before['seen'][step:]
        assert after['losses'] == before['losses'][step:]
        torch.testing.assert_close(after['weights'], before['weights'], rtol=0, atol=0)
