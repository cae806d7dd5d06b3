"""On every rank: the classifier unsharded, sharded, and sharded from the middle.

Writes to the folder of its first argument. One start of the processes serves three trainings.
"""

import sys
from pathlib import Path

from mmvttt.openmmlab.apis.train import train

HERE, FOLDER = Path(__file__).parent, Path(sys.argv[1])

if __name__ == '__main__':
    for name, config, resume in (
        ('ddp', 'images_config.py', None),
        ('fsdp', 'images_fsdp_config.py', None),
        ('rest', 'images_fsdp_config.py', str(FOLDER / 'fsdp/epoch_1.pth')),
    ):
        train(HERE / config, work_dir=str(FOLDER / name), resume=resume, launcher='pytorch')
