"""Draws a trained model's predictions on photographs and videos (mmvttt.openmmlab.apis.inference).

Draws boxes and masks, a label map or the top five classes, depending on the config's toolbox. A
camera runs until Ctrl-C.

example: python tools/image_demo.py maskrcnn_vittt_demo epoch_4.pth photo.jpg --out seen
         python tools/image_demo.py maskrcnn_vittt_demo epoch_4.pth photo.jpg --onnx boxes.onnx
"""

import argparse
import mimetypes
from contextlib import suppress
from pathlib import Path

from rich.progress import track

from mmvttt.openmmlab.apis.inference import show_images, show_video
from mmvttt.openmmlab.cli import (
    add_cfg_options,
    add_config,
    add_device,
    add_exported,
    command_line,
    not_negative,
    plain_errors,
    printable,
)
from mmvttt.openmmlab.config import load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('checkpoint', help='file with the weights')
    parser.add_argument('images', nargs='*', metavar='image|video', help='image or video files')
    parser.add_argument('--camera', type=not_negative, metavar='N', help='number of a camera')
    parser.add_argument('--out', default='work_dirs/image_demo', help='folder of the pictures')
    parser.add_argument(
        '--score-thr', type=float, default=0.3, help='draw boxes from this score on'
    )
    add_device(parser)
    parser.add_argument('--amp', action='store_true', help='run the backbone in mixed precision')
    add_exported(parser)
    add_cfg_options(parser)
    args = parser.parse_intermixed_args(argv)
    if not args.images and args.camera is None:
        parser.error('give images, videos, or --camera N')
    if args.file is not None:
        args.device = 'cpu'
    return args


def is_video(path: str) -> bool:
    return (mimetypes.guess_type(path)[0] or '').startswith('video/')


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    images = [path for path in args.images if not is_video(path)]
    videos: dict[str | int, str] = {p: Path(p).stem for p in args.images if is_video(p)}
    if args.camera is not None:
        videos[args.camera] = f'camera_{args.camera}'
    with plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        where = (args.score_thr, args.device, args.amp, args.file)
        if images:
            findings = show_images(config, args.checkpoint, images, args.out, *where)
            for finding in track(findings, description='images', total=len(images)):
                lines = '; '.join(finding.lines) or 'nothing'
                print(printable(f'{finding.image}: {lines} → {finding.picture}'))
        for source, stem in videos.items():
            out = Path(args.out) / f'{stem}.mp4'
            frames = show_video(config, args.checkpoint, source, out, *where)
            count = 0
            with suppress(KeyboardInterrupt):
                for _ in track(frames, description='frames', total=None):
                    count += 1
            # Closing the generator completes the file.
            frames.close()
            print(printable(f'{source}: {count} frames → {out}'))


if __name__ == '__main__':
    main()
