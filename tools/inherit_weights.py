"""Makes a checkpoint of a linear classifier from a vision transformer's, to be fine-tuned.

For mmvttt.T5, from a ViT or DeiT of timm or mmpretrain; with --model for mmvttt.TimmViT, from that
model of timm. The target has the names of an mmpretrain classifier, backbone.* and head.fc.*. New
tensors are not in it: they are initialised at random, and need a higher learning rate (docs/t5.md).

example: mmvttt inherit_weights deit_tiny.pth t5_tiny_inherited.pth
"""

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('source', help='a checkpoint of a ViT: a file or folder, a URL, timm://NAME.TAG')
    add('target', type=cli.new_file, help='the file to write')
    add('--ema', action='store_true', help='take the averaged weights of the file')
    add('--key', help="entry that holds the weights, e.g. 'teacher'")
    add('--model', help="name of the source in timm's registry, for TimmViT")
    help = 'leave this part of the blocks at random, as the partial inheritance of t5 Tab. 10'
    add('--without', choices=('attention', 'mlp'), help=help)
    help = (
        'of the images that the positions of the source are for, where their number does not tell: '
        'no square, or no row for the class token (FlexiViT: 240 240)'
    )
    cli.add_shape(parser, '--img-size', default=(224, 224), help=help)
    args = vars(parser.parse_args())
    with cli.plain_errors():
        from mmvttt.convert.inherit import inherit_checkpoint

        result = inherit_checkpoint(**args | dict(img_size=tuple(args['img_size'])))
    print(result)
    print(f'wrote {len(result.weights) + len(result.head)} tensors to {args["target"]}')


if __name__ == '__main__':
    main()
