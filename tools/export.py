#!/usr/bin/env python3
"""Writes a trained model for deployment: torch.export (.pt2), ONNX, or OpenVINO (.xml, .bin).

Classifiers and segmentors are exported up to their logits, detectors up to the maps of their neck.
Batch, height and width are free, and the file is compared with the model at several of them.
--predictions writes boxes and masks of a detector, or labels of a segmentor, for one image of one
size.

example: mmvttt export vittt_t_in1k --checkpoint epoch_300.pth --out vittt_t.onnx
         mmvttt export maskrcnn_vittt_s_1x --checkpoint epoch_12.pth --out boxes.onnx \\
             --predictions --shape 800 1344 --images photo.jpg
"""

from typing import Any

from mmvttt import cli
from mmvttt.text import one_line


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('model', help="a config, the name of one of mmvttt's, or a timm model")
    add('--checkpoint', help='file with the weights; default: random ones, but for pedestrians')
    formats = 'FILE.pt2|.onnx|.xml'
    add('--out', type=cli.new_file, required=True, metavar=formats, help='what to write')
    cli.add_shape(parser, help="size of the pictures; default: those of the config's test")
    help = 'free the batch alone, not height and width'
    add('--fixed-size', action='store_true', help=help)
    help = "a .pt2 in torch's own operators, which needs no ttt_kernels and has no fused kernels"
    add('--decompose', action='store_true', help=help)
    help = 'boxes, labels and masks, or a label map, for one image of --shape (.onnx, .xml)'
    add('--predictions', action='store_true', help=help)
    help = 'compare on these photographs'
    add('--images', nargs='+', default=[], metavar='FILE', help=help)
    cli.add_cfg_options(parser, 'model.test_cfg.rcnn.score_thr=0.3')
    args = parser.parse_args()
    size = tuple(args.shape) if args.shape else None
    options: Any = dict(fixed_size=args.fixed_size, decompose=args.decompose, images=args.images)
    with cli.plain_errors():
        from mmvttt.by_name import find_model, resolve
        from mmvttt.checkpoints.published import SHORT_NAMES
        from mmvttt.deploy.export import require_format
        from mmvttt.deploy.model_file import write_model

        require_format(args.out)
        named, checkpoint = find_model(args.model, args.cfg_options), args.checkpoint
        if args.model in SHORT_NAMES:
            _, checkpoint = resolve(args.model, checkpoint)
        files = checkpoint, args.out
        if named.config is None and not args.predictions:
            comparisons = write_model(named, named.model, *files, size, **options)
        else:
            from mmvttt.openmmlab.apis.export import export_model

            comparisons = export_model(named, *files, args.predictions, size=size, **options)
        for comparison in comparisons:
            print(comparison)
    random = ', with random weights: give --checkpoint' * (not (checkpoint or named.weights))
    print(one_line(f'wrote {args.out}{random}'))


if __name__ == '__main__':
    main()
