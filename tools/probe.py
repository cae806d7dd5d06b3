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

from pathlib import Path

from mmvttt import cli
from mmvttt.openmmlab.analysis.probe import probe_models


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('model', help="a config, the name of one of ours, or a ViT of timm's")
    add('train', type=Path, help='images that the probes learn from, by class')
    add('test', type=Path, help='images that are counted, by class')
    add('--checkpoint', help='weights of the model; default: from init_cfg')
    add('--key', help="entry of the checkpoint with the weights, e.g. 'teacher'")
    add('--twin', help='weights of the linearized model; "untrained": at random')
    both = dict(nargs=2, metavar=('TRAIN', 'TEST'))
    help = 'number of images, evenly of all classes; default: all'
    add('--most', type=cli.positive, default=(None, None), help=help, **both)
    add('--maps', type=Path, help='label maps', **both)
    add('--out', type=cli.new_folder, default='work_dirs/probe')
    cli.add_shape(parser, default=(224, 224), help='size to which images are resized')
    cli.add_cfg_options(parser, 'model.backbone.model=vit_base_patch16_dinov3')
    args = vars(parser.parse_args())
    with cli.plain_errors():
        print(probe_models(**{**args, 'out': Path(args['out'])}))


if __name__ == '__main__':
    main()
