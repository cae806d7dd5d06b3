"""Probes frozen features on folders of classes: nearest neighbours and a linear probe.

TRAIN and TEST contain a folder of images for each class. With --twin, a linearized checkpoint of
the same model is compared with its source: agreement of neighbours, cosine of patch tokens by
block. The source's own linear head is applied to both if it has the folders' classes. Writes
probe.csv.

With --maps, two more folders hold label maps, with the names of the images and 255 where there is
no class: a linear probe of patches, its mean intersection over union counted on patches.

example: python tools/probe.py vit_small_patch16_dinov3 pictures/train pictures/test \\
             --checkpoint dinov3-vits16/ --twin work_dirs/distil_dinov3_s_10k/iter_10000.pth
"""

import argparse
from pathlib import Path

from mmvttt.cli import (
    add_cfg_options,
    add_shape,
    command_line,
    new_folder,
    plain_errors,
    positive,
)
from mmvttt.openmmlab.analysis.probe import probe_models


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('model', help="a config, the name of one of ours, or a ViT of timm's")
    parser.add_argument('train', type=Path, help='images that the probes learn from, by class')
    parser.add_argument('test', type=Path, help='images that are counted, by class')
    parser.add_argument('--checkpoint', help='weights of the model; default: from init_cfg')
    parser.add_argument('--key', help="entry of the checkpoint with the weights, e.g. 'teacher'")
    parser.add_argument('--twin', help='weights of the linearized model; "untrained": at random')
    parser.add_argument(
        '--most',
        nargs=2,
        type=positive,
        default=(None, None),
        metavar=('TRAIN', 'TEST'),
        help='number of images, evenly of all classes; default: all',
    )
    parser.add_argument('--maps', nargs=2, type=Path, metavar=('TRAIN', 'TEST'), help='label maps')
    parser.add_argument('--out', type=new_folder, default='work_dirs/probe')
    add_shape(parser, default=(224, 224), help='size to which images are resized')
    add_cfg_options(parser, 'model.backbone.model=vit_base_patch16_dinov3')
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    with plain_errors():
        print(probe_models(**{**args, 'out': Path(args['out'])}))


if __name__ == '__main__':
    main()
