"""Writes a trained model for deployment: torch.export (.pt2), ONNX, or OpenVINO (.xml, .bin).

Classifiers and segmentors are exported up to their logits, detectors up to the maps of their neck.
Batch, height and width are free, and the file is compared with the model at several of them.
--predictions writes boxes and masks of a detector, or labels of a segmentor, for one image of one
size.

example: python tools/export.py vittt_t_in1k --checkpoint epoch_300.pth --out vittt_t.onnx
         python tools/export.py maskrcnn_vittt_s_1x --checkpoint epoch_12.pth --out boxes.onnx \\
             --predictions --shape 800 1344 --images photo.jpg
"""

import argparse

from mmvttt.openmmlab.apis.export import export_model
from mmvttt.openmmlab.cli import add_cfg_options, add_shape, command_line, plain_errors


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('model', help="a config, the name of one of ours, or a model of timm's")
    parser.add_argument('--checkpoint', help='file with the weights; default: random ones')
    parser.add_argument('--out', required=True, metavar='FILE.pt2|.onnx|.xml', help='what to write')
    add_shape(parser)
    parser.add_argument(
        '--fixed-size', action='store_true', help='free the batch alone, not height and width'
    )
    parser.add_argument(
        '--decompose',
        action='store_true',
        help="a .pt2 in torch's own operators, which needs no ttt_kernels and has no fused kernels",
    )
    parser.add_argument(
        '--predictions',
        action='store_true',
        help='boxes, labels and masks, or a label map, for one image of --shape (.onnx, .xml)',
    )
    parser.add_argument(
        '--images', nargs='+', default=[], metavar='FILE', help='compare on these photographs'
    )
    add_cfg_options(parser, 'model.test_cfg.rcnn.score_thr=0.3')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    size = tuple(args.shape) if args.shape else None
    with plain_errors():
        comparisons = export_model(
            args.model,
            args.checkpoint,
            args.out,
            size,
            args.fixed_size,
            args.decompose,
            args.cfg_options,
            args.predictions,
            args.images,
        )
        for found in comparisons:
            print(found)
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
