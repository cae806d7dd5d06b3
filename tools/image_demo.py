"""Draws a trained model's predictions on photographs (mmvttt.openmmlab.apis.inference).

Draws boxes and masks, a label map or the top five classes, depending on the config's toolbox. A
model that comes with its weights needs no checkpoint.

example: mmvttt predict pedestrians photo.jpg
         mmvttt predict maskrcnn_vittt_demo epoch_4.pth photo.jpg --out seen
"""

import mimetypes

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    cli.add_config(parser, help='a config, or a name of `mmvttt weights`, or pedestrians')
    help = 'the weights, unless they come with mmvttt, then image files'
    add('images', nargs='+', metavar='[checkpoint] image', help=help)
    help = 'folder of the pictures'
    add('--out', type=cli.new_folder, default='work_dirs/image_demo', help=help)
    add('--score-thr', type=float, default=0.5, help='draw boxes from this score on')
    cli.add_device(parser)
    add('--amp', action='store_true', help='run the backbone in mixed precision')
    cli.add_exported(parser)
    cli.add_cfg_options(parser)
    args = parser.parse_intermixed_args()
    images, checkpoint = args.images, None
    if not (mimetypes.guess_type(images[0], strict=False)[0] or '').startswith('image/'):
        checkpoint, *images = images
    if not images:
        parser.error('give images after the checkpoint')
    with cli.plain_errors():
        from mmvttt.by_name import resolve
        from mmvttt.checkpoints.sources import find_source
        from mmvttt.openmmlab.apis.inference import open_model, require_images
        from mmvttt.openmmlab.config import load_config

        pictures = require_images(images, args.out)
        name, checkpoint = resolve(args.config, checkpoint)
        find_source(checkpoint)
        config = load_config(name, cfg_options=args.cfg_options, needed=('model',))
        device = 'cpu' if args.file else args.device or cli.default_device()
        predictor = open_model(config, checkpoint, device, args.amp, args.file)
        for image, picture in zip(images, pictures, strict=True):
            prediction = predictor.predict(image, args.score_thr)
            prediction.save(picture)
            lines = '; '.join(prediction.lines) or 'nothing'
            print(cli.printable(f'{image}: {lines} → {picture}'))


if __name__ == '__main__':
    main()
