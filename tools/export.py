"""Writes a trained model for deployment: torch.export (.pt2), ONNX, or OpenVINO (.xml, .bin).

Classifiers and segmentors are exported up to their logits, detectors up to the maps of their neck.
Batch, height and width are free, and the file is compared with the model at several of them.
--predictions writes boxes and masks of a detector, or labels of a segmentor, for one image of one
size.

example: mmvttt export vittt_t_in1k --checkpoint epoch_300.pth --out vittt_t.onnx
         mmvttt export maskrcnn_vittt_s_1x --checkpoint epoch_12.pth --out boxes.onnx \\
             --predictions --shape 800 1344 --images photo.jpg
"""

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('model', help="a config, the name of one of mmvttt's, or a timm model")
    add('--checkpoint', help='file with the weights; default: random ones')
    formats = 'FILE.pt2|.onnx|.xml'
    add('--out', type=cli.new_file, required=True, metavar=formats, help='what to write')
    cli.add_shape(parser)
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
    files = args.checkpoint, args.out, size, args.fixed_size, args.decompose
    with cli.plain_errors():
        from mmvttt.deploy.export import require_format
        from mmvttt.deploy.model_file import write_model
        from mmvttt.named_model import find_timm, is_timm

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
