"""Evaluates a checkpoint on the test set of a config of mmdet, mmsegmentation or mmpretrain.

example: python tools/test.py configs/maskrcnn_vittt_demo.py work_dirs/demo/epoch_4.pth
         python tools/test.py cifar10_vittt_nano mmvttt://cifar10_vittt_nano --openvino vittt.xml
"""

import argparse
import os

from mmvttt.cli import (
    add_cfg_options,
    add_config,
    add_exported,
    add_launcher,
    command_line,
    new_file,
    new_folder,
    plain_errors,
)
from mmvttt.openmmlab.apis.evaluate import evaluate


def parse_args() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('checkpoint', help='file with the weights')
    parser.add_argument(
        '--work-dir',
        type=new_folder,
        help='where to write; default: work_dirs/<name of the config>',
    )
    parser.add_argument(
        '--out', type=new_file, metavar='FILE.pkl', help='write the predictions to a pickle file'
    )
    parser.add_argument(
        '--show-dir', type=new_folder, metavar='DIR', help='draw the predictions into a folder'
    )
    parser.add_argument(
        '--mistakes',
        type=new_folder,
        metavar='DIR',
        help='draw the confusion matrix into a folder, of detectors also precision over recall',
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help="merge the predictions for versions of an image, by the config's tta_pipeline and "
        'tta_model',
    )
    parser.add_argument('--amp', action='store_true', help='run the backbone in mixed precision')
    add_exported(parser)
    parser.add_argument(
        '--cuda-graph',
        action='store_true',
        help='replay the backbone as a CUDA graph, where all images have one size: a classifier',
    )
    add_cfg_options(parser, 'test_dataloader.batch_size=4')
    add_launcher(parser)
    return parser.parse_args()


def main() -> None:
    args = vars(parse_args())
    os.environ.setdefault('LOCAL_RANK', str(args.pop('local_rank')))
    with plain_errors(args['launcher']):
        evaluate(**args)


if __name__ == '__main__':
    main()
