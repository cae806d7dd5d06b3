"""Draws a trained model's predictions on photographs and videos (mmvttt.openmmlab.apis.inference).

Draws boxes and masks, a label map or the top five classes, depending on the config's toolbox. A
camera runs until Ctrl-C. A model that comes with its weights needs no checkpoint.

example: python tools/image_demo.py pedestrians photo.jpg
         python tools/image_demo.py maskrcnn_vittt_demo epoch_4.pth photo.jpg --out seen
"""

import argparse
import mimetypes
from contextlib import suppress
from pathlib import Path

from mmvttt import cli
from mmvttt.by_name import NAMES, resolve
from mmvttt.checkpoints.sources import located
from mmvttt.errors import UsageError
from mmvttt.openmmlab.config import load_config


def parse_args() -> argparse.Namespace:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    cli.add_config(parser, help=f"a config, the name of one of mmvttt's, or {', '.join(NAMES)}")
    names = '[checkpoint] image|video'
    help = 'the weights, unless they come with mmvttt, then image or video files'
    add('images', nargs='*', metavar=names, help=help)
    add('--camera', type=cli.not_negative, metavar='N', help='number of a camera')
    help = 'folder of the pictures'
    add('--out', type=cli.new_folder, default='work_dirs/image_demo', help=help)
    add('--score-thr', type=float, default=0.5, help='draw boxes from this score on')
    # No default, which would import torch before the files are looked for.
    add('--device', type=cli.usable_device, help='default: a GPU if there is one')
    add('--amp', action='store_true', help='run the backbone in mixed precision')
    cli.add_exported(parser)
    cli.add_cfg_options(parser)
    args = parser.parse_intermixed_args()
    args.checkpoint = None
    if args.images and not kind_of(args.images[0]):
        args.checkpoint = args.images.pop(0)
    if not args.images and args.camera is None:
        parser.error('give images, videos, or --camera N')
    if args.file is not None:
        args.device = 'cpu'
    return args


def kind_of(path: str) -> str | None:
    """'image' or 'video' by the name of a file; None for other files, such as checkpoints."""
    kind = (mimetypes.guess_type(path)[0] or '').partition('/')[0]
    return kind if kind in ('image', 'video') else None


def main() -> None:
    args = parse_args()
    images = [path for path in args.images if kind_of(path) != 'video']
    videos: dict[str | int, str] = {p: Path(p).stem for p in args.images if p not in images}
    if args.camera is not None:
        videos[args.camera] = f'camera_{args.camera}'
    with cli.plain_errors():
        for path in args.images:
            if not Path(path).is_file():
                raise UsageError(f'there is no {kind_of(path) or "image"} {path!r}')
        name, checkpoint = resolve(args.config, args.checkpoint)
        located(checkpoint)
        config = load_config(name, cfg_options=args.cfg_options)
        # Its imports take seconds.
        from mmvttt.openmmlab.apis import inference as api

        api.require_images(images, args.out)
        device = args.device or cli.default_device()
        predictor = api.open_model(config, checkpoint, device, args.amp, args.file)
        for image, (prediction, picture) in zip(
            images, api.show_images(predictor, images, args.out, args.score_thr), strict=True
        ):
            lines = '; '.join(prediction.lines) or 'nothing'
            print(cli.printable(f'{image}: {lines} → {picture}'))
        for source, stem in videos.items():
            out = Path(args.out) / f'{stem}.mp4'
            frames = api.show_video(predictor, source, out, args.score_thr)
            count = 0
            with suppress(KeyboardInterrupt):
                for _ in frames:
                    count += 1
            # Closing the generator completes the file.
            frames.close()
            print(cli.printable(f'{source}: {count} frames → {out}'))


if __name__ == '__main__':
    main()
