#!/usr/bin/env python3
"""Trains a model on a folder of annotated pictures, from trained weights.

Boxes and masks (COCO, YOLO, Pascal VOC, labelme, CVAT, Label Studio), label maps, or a folder for
each class. The same line resumes a stopped training; --plan trains nothing.

example: mmvttt finetune photos
"""

import json
import sys
import warnings
from functools import partial

import mmvttt
from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('folder')
    help = (
        "published weights (`mmvttt weights`), an earlier finetune's folder, a config and its "
        'checkpoint, or small; default: the best available'
    )
    add('--from', dest='start', nargs='+', metavar='NAME', help=help)
    add('--work-dir', help='where to write; default: work_dirs/finetune_<name of the folder>')
    add(
        '--minutes',
        type=cli.duration,
        help='length of the training; default: 10 on a CPU, 30 on a GPU',
    )
    add('--steps', type=cli.positive, help='its length in steps instead')
    add('--format', help='the format of the annotations, where several would explain the folder')
    add('--plan', action='store_true', help='print the plan as JSON, and train nothing')
    options = vars(parser.parse_args())
    # Warnings of the toolboxes for authors of configs.
    warnings.filterwarnings('ignore', module='mm(engine|cv|det|seg|pretrain)[.]')
    with cli.plain_errors(stopped='stopped; the same command resumes it'):
        if options.pop('plan'):
            options.pop('work_dir')
            content = mmvttt.plan(**options, say=partial(print, file=sys.stderr, flush=True))
            content['pictures'] = len(content['pictures'])
            text = json.dumps(content, indent=1, ensure_ascii=False)
            # Letters of any script, and no control characters.
            print(''.join(c if c in '\n' or c.isprintable() else json.dumps(c)[1:-1] for c in text))
            return
        try:
            mmvttt.finetune(**options, say=partial(print, flush=True))
        except SystemExit:
            # A training that has saved itself ends with status 0, for schedulers.
            raise KeyboardInterrupt from None


if __name__ == '__main__':
    main()
