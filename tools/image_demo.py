#!/usr/bin/env python3
"""Predicts on photographs and videos by a trained model, and draws what it sees.

Boxes and masks, a label map or the top five classes, depending on the model. IMAGES are files,
folders, patterns such as 'shots/*.jpg', and videos. --save writes all predictions as a table, or as
COCO's annotations with scores, which annotation tools import.

example: mmvttt predict pedestrians photo.jpg
         mmvttt predict maskrcnn_vittt_demo epoch_4.pth photos/ --out seen --save seen.json
"""

import os
import sys
import time
from pathlib import Path

from mmvttt import cli
from mmvttt.text import one_line

# Seconds between two lines on the time that is left.
_INTERVAL = 30
WEIGHTS = ('.pth', '.pt', '.bin', '.safetensors', '.ckpt')


def is_checkpoint(text: str) -> bool:
    """Whether an argument names weights: a file, a folder with some, or a name on a hub.

    A folder with pictures is taken for them, whatever else an annotation tool left in it.
    """
    if not os.path.isdir(text):
        return text.endswith((*WEIGHTS, '.json')) or (':' in text and not os.path.exists(text))
    from mmvttt.pictures import SUFFIXES

    suffixes = {Path(name).suffix.lower() for name in os.listdir(text)}
    return not suffixes.isdisjoint(WEIGHTS) and suffixes.isdisjoint(SUFFIXES)


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    cli.add_config(parser, help='a config, or a name of `mmvttt weights`, or pedestrians')
    help = 'the weights, unless they come with the name; then images, folders and videos'
    add('images', nargs='+', metavar='[checkpoint] image', help=help)
    help = 'folder of the drawings'
    add('--out', type=cli.new_folder, default='work_dirs/predict', help=help)
    add('--score-thr', type=float, default=0.5, help='leave out boxes below this score')
    help = 'all predictions, in one file'
    add('--save', type=cli.new_file, metavar='FILE.csv|.json', help=help)
    help = 'look at large pictures in tiles of this side'
    add('--tiles', type=cli.positive, metavar='PIXELS', help=help)
    help = 'images of one size that run together; default: 8 on a GPU, else 1'
    add('--batch', type=cli.positive, metavar='IMAGES', help=help)
    cli.add_device(parser)
    add('--amp', action='store_true', help='run the backbone in mixed precision')
    cli.add_exported(parser)
    cli.add_cfg_options(parser)
    args = parser.parse_intermixed_args()
    images, checkpoint = args.images, None
    if is_checkpoint(images[0]):
        checkpoint, *images = images
    if not images:
        parser.error('give images after the checkpoint')
    with cli.plain_errors():
        from mmvttt.arguments import check_part
        from mmvttt.by_name import resolve
        from mmvttt.errors import UsageError

        # Before the imports that take seconds.
        check_part('--score-thr', args.score_thr)
        if args.save and not args.save.endswith(('.csv', '.json')):
            raise UsageError(f'--save {args.save!r}: give a file that ends in .csv or .json')
        name, checkpoint = resolve(args.config, checkpoint)
        from mmvttt.openmmlab.config import load_config

        # Before a download: the config's toolbox may not be installed.
        config = load_config(name, cfg_options=args.cfg_options, needed=('model',))
        from mmvttt.checkpoints.sources import find_source
        from mmvttt.openmmlab.apis import predict
        from mmvttt.openmmlab.apis.predictor import open_model

        pairs = predict.drawings(predict.find_images(images), args.out)
        find_source(checkpoint)
        device = 'cpu' if args.file else args.device or cli.default_device()
        predictor = open_model(config, checkpoint, device, args.amp, args.file)
        options = args.score_thr, args.save, args.tiles, args.batch
        start = reported = time.monotonic()
        predictions = predict.predict_files(predictor, pairs, *options)
        for count, (file, text, drawing) in enumerate(predictions, 1):
            print(one_line(f'{file}: {text} → {drawing}'), flush=True)
            now = time.monotonic()
            if now - reported > _INTERVAL and count < len(pairs):
                reported, left = now, (now - start) / count * (len(pairs) - count)
                progress = f'{count} of {len(pairs)} files, {left / 60:.0f} minutes left'
                print(progress, file=sys.stderr, flush=True)
        if args.save:
            print(one_line(f'wrote {Path(args.save)}'))


if __name__ == '__main__':
    main()
