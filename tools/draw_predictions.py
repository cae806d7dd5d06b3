"""Draws predictions next to the ground truth (mmvttt.openmmlab.analysis.predictions).

For a detector boxes and masks, for a segmentor label maps; predictions only if the set has no
annotations.

example: python tools/draw_predictions.py configs/maskrcnn_vittt_demo.py work_dirs/demo
"""

from pathlib import Path

from mmvttt import cli
from mmvttt.errors import UsageError
from mmvttt.openmmlab.analysis.predictions import draw_predictions, tile
from mmvttt.openmmlab.config import load_config
from mmvttt.openmmlab.reliability.data.annotations import check_data
from mmvttt.openmmlab.reliability.resume import latest_checkpoint


def main() -> None:
    parser = cli.command_line(__doc__)
    cli.add_config(parser)
    add = parser.add_argument
    add('checkpoint', help='a checkpoint, or a work directory for its latest one')
    help = 'folder of the pictures; default: predictions/ next to it'
    add('--out', type=cli.new_folder, help=help)
    help = 'images, spread over the test set'
    add('--num-images', type=cli.positive, default=12, help=help)
    help = 'draw the first N images instead, and one picture of all'
    add('--grid', type=cli.positive, metavar='N', help=help)
    add('--score-thr', type=float, default=0.3, help='draw from this score on')
    cli.add_device(parser)
    cli.add_cfg_options(parser)
    args = parser.parse_args()
    with cli.plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        check_data(config, ('test',))
        path = Path(args.checkpoint)
        checkpoint = Path(latest_checkpoint(path)[0] or path) if path.is_dir() else path
        if not checkpoint.is_file():
            raise UsageError(
                f'no checkpoint at {path}: pass a .pth file, or the --work-dir of a run'
            )
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
