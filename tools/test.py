#!/usr/bin/env python3
"""Evaluates a checkpoint on the test set of a config of mmdet, mmsegmentation or mmpretrain.

example: mmvttt test configs/maskrcnn_vittt_demo.py work_dirs/demo/epoch_4.pth
         mmvttt test cifar10_vittt_nano mmvttt://cifar10_vittt_nano --openvino vittt.xml
"""

import os

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    cli.add_config(parser)
    add = parser.add_argument
    add('checkpoint', help='file with the weights')
    help = 'where to write; default: work_dirs/<name of the config>'
    add('--work-dir', type=cli.new_folder, help=help)
    help = 'write the predictions to a pickle file'
    add('--out', type=cli.new_file, metavar='FILE.pkl', help=help)
    help = 'draw the predictions into a folder'
    add('--show-dir', type=cli.new_folder, metavar='DIR', help=help)
    help = (
        "merge the predictions for versions of an image, by the config's tta_pipeline and tta_model"
    )
    add('--tta', action='store_true', help=help)
    add('--amp', action='store_true', help='run the backbone in mixed precision')
    help = 'replay the backbone as a CUDA graph, where all images have one size: a classifier'
    add('--cuda-graph', action='store_true', help=help)
    cli.add_exported(parser)
    cli.add_cfg_options(parser, 'test_dataloader.batch_size=4')
    cli.add_launcher(parser)
    args = vars(parser.parse_args())
    os.environ.setdefault('LOCAL_RANK', str(args.pop('local_rank')))
    with cli.plain_errors(args['launcher']):
        from mmvttt.openmmlab.apis.evaluate import evaluate

        evaluate(**args)


if __name__ == '__main__':
    main()
