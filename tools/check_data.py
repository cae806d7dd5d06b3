#!/usr/bin/env python3
"""Checks the data of a config: annotations, labels, files, images.

See mmvttt.openmmlab.data.annotations. Exit status 1 if there are errors. Warnings name
data that a training silently drops.

example: mmvttt check_data configs/maskrcnn_vittt_t_pennfudan.py
"""

from mmvttt import cli
from mmvttt.errors import UsageError


def main() -> None:
    parser = cli.command_line(__doc__)
    cli.add_config(parser)
    splits = ('train', 'val', 'test')
    parser.add_argument('--splits', nargs='+', choices=splits, default=splits)
    help = 'do not decode the images: seconds, not minutes'
    parser.add_argument('--no-images', action='store_true', help=help)
    cli.add_cfg_options(parser)
    args = parser.parse_args()
    checked = wrong = 0
    with cli.plain_errors():
        from mmvttt.openmmlab.config import load_config
        from mmvttt.openmmlab.data.annotations import check_annotations
        from mmvttt.openmmlab.data.dataset_config import datasets_of

        config = load_config(args.config, cfg_options=args.cfg_options)
        sets, images = datasets_of(config), not args.no_images
        for findings in check_annotations(config, sets, args.splits, images=images):
            print(findings)
            checked += 1
            wrong += bool(findings.errors)
        if not checked:
            raise UsageError(
                'there is nothing to check: the config has no data set of COCO, label maps or '
                f'folders of pictures in {", ".join(args.splits)}'
            )
    print(f'{checked} data sets, {wrong} of them with errors')
    raise SystemExit(1 if wrong else 0)


if __name__ == '__main__':
    main()
