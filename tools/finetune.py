"""Trains a model on a folder of annotated pictures, from trained weights.

The folder is COCO's JSON as Roboflow and CVAT export it, YOLO, Pascal VOC, pictures with label
maps, or a folder for each class. The same line resumes a stopped training.

example: mmvttt finetune photos
"""

from functools import partial

import mmvttt
from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('folder')
    help = 'the name of published weights (`mmvttt weights`); default: by data and machine'
    add('--from', dest='start', metavar='NAME', help=help)
    add('--work-dir', help='where to write; default: work_dirs/finetune_<name of the folder>')
    help = 'length of the training; default: by the number of pictures and the machine'
    add('--steps', type=cli.positive, help=help)
    args = parser.parse_args()
    with cli.plain_errors():
        try:
            mmvttt.finetune(**vars(args), say=partial(print, flush=True))
        except (KeyboardInterrupt, SystemExit):
            # A training that has saved itself ends with status 0, for schedulers.
            print('stopped; the same command resumes it')
            raise SystemExit(130) from None


if __name__ == '__main__':
    main()
