"""dist_train.sh, dist_test.sh and slurm_train.sh: the torchrun command lines that they end in."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ..processes import Ended, run

TOOLS = Path(__file__).parents[2] / 'tools'
VARIABLES = ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT', 'RDZV_ID', 'LOCAL_ADDR', 'GPUS')


@pytest.fixture
def call(tmp_path: Path) -> object:
    """Runs a script with an interpreter, srun and scontrol that print what they are given."""
    fakes = {
        'python': 'printf "%s\\n" "$@"',
        # Two nodes, one after the other, as slurm would start them side by side.
        'srun': (
            'for arg in "$@"; do case "$arg" in --*) echo "srun $arg"; shift;; *) break;; esac; '
            'done; for node in $(seq 0 $((NNODES - 1))); do SLURM_NODEID=$node "$@"; done'
        ),
        'scontrol': 'printf "node-a\\nnode-b\\n"',
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\n{body}\n')
        (tmp_path / name).chmod(0o755)

    def call(script: str, *args: str, **env: str) -> Ended:
        clean = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, 'PYTHON')}
        path = f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'
        return run(TOOLS / script, *args, cwd=tmp_path, env={**clean, **env, 'PATH': path})

    return call


def test_one_node(call) -> None:
    lines = call('dist_train.sh', 'my config.py', '4', '--amp', '--work-dir', 'a b').stdout
    assert lines.splitlines() == [
        *('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '4'),
        *(str(TOOLS / 'train.py'), 'my config.py', '--amp', '--work-dir', 'a b'),
        *('--launcher', 'pytorch'),
    ]
    lines = call('dist_test.sh', 'c.py', 'a.pth', '2', '--out', 'p.pkl').stdout.splitlines()
    assert lines[-7:] == [
        *(str(TOOLS / 'test.py'), 'c.py', 'a.pth', '--out', 'p.pkl', '--launcher', 'pytorch')
    ]


@pytest.mark.parametrize(
    ('env', 'words'),
    [
        ('PORT=1234', '--nnodes 1 --master-addr 127.0.0.1 --master-port 1234'),
        (
            'NNODES=2 MASTER_ADDR=n0 NODE_RANK=1',
            '--nnodes 2 --node-rank 1 --master-addr n0 --master-port 29500',
        ),
        (
            'NNODES=2 MASTER_ADDR=n0 PORT=1234',
            '--rdzv-backend c10d --rdzv-endpoint n0:1234 --rdzv-id mmvttt',
        ),
        (
            'NNODES=2 MASTER_ADDR=n0 RDZV_ID=b LOCAL_ADDR=10.0.0.2',
            '--rdzv-id b --local-addr 10.0.0.2',
        ),
    ],
)
def test_where_the_nodes_meet(call, env: str, words: str) -> None:
    variables = dict(pair.split('=') for pair in env.split())
    command = ' '.join(call('dist_train.sh', 'c.py', '2', **variables).stdout.split())
    assert f' {words} ' in command
    assert ('node-rank' if 'rdzv' in words else 'rdzv') not in command


@pytest.mark.parametrize(
    ('line', 'env', 'message'),
    [
        ('dist_train.sh c.py', '', 'usage: '),
        ('dist_test.sh c.py', '', 'usage: '),
        ('slurm_train.sh c.py', '', 'usage: '),
        ('dist_train.sh c.py 8', 'NNODES=2', 'NNODES=2 needs MASTER_ADDR'),
        ('dist_train.sh c.py 8', 'NNODES=2 MASTER_ADDR=n0 NODE_RANK=2', 'NODE_RANK=2 is none of'),
        ('slurm_train.sh p j c.py w', 'GPUS=12', 'is not a multiple of GPUS_PER_NODE=8'),
    ],
)
def test_mistakes_start_nothing(call, line: str, env: str, message: str) -> None:
    done = call(*line.split(), **dict(pair.split('=') for pair in env.split()))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ''


@pytest.mark.parametrize(
    ('script', 'program', 'args'),
    [
        ('dist_train.sh', 'python', ('c.py', '2')),
        ('dist_test.sh', 'python', ('c.py', 'a.pth', '2')),
        ('slurm_train.sh', 'srun', ('gpu', 'job', 'c.py', 'w')),
    ],
)
def test_sigterm_to_the_script_reaches_what_it_starts(
    tmp_path: Path, script: str, program: str, args: tuple[str, ...]
) -> None:
    """A bash that waits for its child dies of a SIGTERM, and leaves the child alone."""
    fake = tmp_path / program
    fake.write_text(
        '#!/usr/bin/env bash\ntrap "echo heard; exit 7" TERM\necho ready\n'
        'for i in {1..300}; do sleep 0.1; done\n'
    )
    fake.chmod(0o755)
    process = subprocess.Popen(
        [str(TOOLS / script), *args],
        env={**os.environ, 'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'PYTHON': ''},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == 'ready\n'
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == 'heard\n'
    finally:
        process.kill()
    assert process.returncode == 7


def test_slurm_starts_one_torchrun_on_every_node(call) -> None:
    done = call(
        *('slurm_train.sh', 'gpu', 'my job', 'c.py', 'a b', '--amp'),
        GPUS='16',
        SRUN_ARGS='--qos=high --exclusive',
        SLURM_JOB_ID='20007',
        SLURM_JOB_NODELIST='node-[a-b]',
    )
    assert done.returncode == 0, done.stderr
    for option in (
        *('--partition=gpu', '--job-name=my job', '--nodes=2', '--ntasks=2', '--ntasks-per-node=1'),
        *('--gres=gpu:8', '--cpus-per-task=40', '--kill-on-bad-exit=1', '--qos=high'),
        '--exclusive',
    ):
        assert f'srun {option}\n' in done.stdout
    for rank in (0, 1):
        assert (
            f'--nnodes\n2\n--node-rank\n{rank}\n--master-addr\nnode-a\n--master-port\n20007\n'
            f'--nproc-per-node\n8\n{TOOLS}/train.py\nc.py\n--work-dir\na b\n--amp\n'
        ) in done.stdout


def test_slurm_with_less_than_a_node(call) -> None:
    env = dict(GPUS='2', SLURM_JOB_ID='1', SLURM_JOB_NODELIST='node-a', PORT='9')
    out = call('slurm_train.sh', 'p', 'j', 'c.py', 'w', **env).stdout
    assert 'srun --gres=gpu:2\n' in out
    assert '--nnodes\n1\n' in out
    assert '--nproc-per-node\n2\n' in out
