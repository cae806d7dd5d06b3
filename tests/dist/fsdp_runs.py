"""On every rank: the classifier unsharded, sharded, and sharded from the middle.

Writes to the folder of its first argument. One start of the processes serves three trainings.
"""

import sys
from pathlib import Path

from mmvttt.openmmlab.apis.train import train

HERE = Path(__file__).parent


def main() -> None:
    folder = Path(sys.argv[1])
    plain, sharded = HERE / 'images_config.py', HERE / 'images_fsdp_config.py'
    runs = {
        'ddp': (plain, None),
        'fsdp': (sharded, None),
        'rest': (sharded, 'fsdp'),
    }
    for name, (config, of) in runs.items():
        half = of and str(folder / of / 'epoch_1.pth')
        train(config, work_dir=str(folder / name), resume=half, launcher='pytorch')


if __name__ == '__main__':
    main()
