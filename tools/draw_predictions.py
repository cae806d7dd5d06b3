"""Draws predictions next to the ground truth (mmvttt.openmmlab.analysis.predictions).

For a detector boxes and masks, for a segmentor label maps; predictions only if the set has no
annotations.

example: python tools/draw_predictions.py configs/maskrcnn_vittt_demo.py work_dirs/demo
"""

import argparse
from pathlib import Path

from mmvttt.cli import (
    add_cfg_options,
    add_config,
    add_device,
    command_line,
    new_folder,
    plain_errors,
    positive,
)
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.predictions import draw_predictions, tile
from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.reliability.data.annotations import check_data
from mmvttt.openmmlab.reliability.resume import latest_checkpoint


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('checkpoint', help='a checkpoint, or a work directory for its latest one')
    parser.add_argument(
        '--out', type=new_folder, help='folder of the pictures; default: predictions/ next to it'
    )
    parser.add_argument(
        '--num-images', type=positive, default=12, help='images, spread over the test set'
    )
    parser.add_argument(
        '--grid',
        type=positive,
        metavar='N',
        help='draw the first N images instead, and one picture of all',
    )
    parser.add_argument('--score-thr', type=float, default=0.3, help='draw from this score on')
    add_device(parser)
    add_cfg_options(parser)
    return parser.parse_args(argv)


def find_checkpoint(path: Path) -> Path:
    """The path itself, or the latest checkpoint if it is a work directory."""
    latest = latest_checkpoint(path)[0] if path.is_dir() else path
    if latest is None or not Path(latest).is_file():
        raise UsageError(f'no checkpoint at {path}: pass a .pth file, or the --work-dir of a run')
    return Path(latest)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        check_data(config, ('test',))
        checkpoint = find_checkpoint(Path(args.checkpoint))
        out = Path(args.out or checkpoint.parent / 'predictions')
        files = draw_predictions(
            *(config, checkpoint, out, args.grid or args.num_images),
            *(args.score_thr, args.device, args.grid is not None),
        )
        grid = tile(files, out / 'grid.png') if args.grid else None
    print(f'checkpoint: {checkpoint}')
    print(f'{len(files)} images, ground truth on the left, predictions on the right: {out}')
    if grid:
        print(f'all of them: {grid}')


if __name__ == '__main__':
    main()
