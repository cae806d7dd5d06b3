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

from mmvttt.cli import add_cfg_options, add_shape, command_line, new_file, plain_errors
from mmvttt.deploy.export import require_format
from mmvttt.deploy.model_file import write_model
from mmvttt.named_model import find_timm, is_timm


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('model', help="a config, the name of one of mmvttt's, or a timm model")
    parser.add_argument('--checkpoint', help='file with the weights; default: random ones')
    parser.add_argument(
        '--out', type=new_file, required=True, metavar='FILE.pt2|.onnx|.xml', help='what to write'
    )
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
    files = args.checkpoint, args.out, size, args.fixed_size, args.decompose
    with plain_errors():
        if is_timm(args.model) and not args.predictions:
            require_format(args.out)
            named = find_timm(args.model, args.cfg_options)
            comparisons = write_model(named, named.model, *files, args.images)
        else:
            from mmvttt.openmmlab.apis.export import export_model

            more = args.cfg_options, args.predictions, args.images
            comparisons = export_model(args.model, *files, *more)
        for comparison in comparisons:
            print(comparison)
    print(f'wrote {args.out}')


if __name__ == '__main__':
    main()
