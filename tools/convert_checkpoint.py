"""Converts public ViT³, H-ViT³, T⁵, DiT³, DiT⁵ and DiT checkpoints to ours.

example: mmvttt convert_checkpoint vit3_small_public.pth vit3_small.pth
"""

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('source', help='a checkpoint of classification, detection or segmentation')
    add('target', type=cli.new_file, help='the file to write')
    help = "public: the authors' names, for DiT³, DiT⁵ and DiT"
    add('--to', choices=('ours', 'public'), default='ours', help=help)
    help = "take the averaged weights (of EMA, or MESA's teacher)"
    add('--ema', action='store_true', help=help)
    help = (
        'side of the latents whose positions a public DiT³, DiT⁵ or DiT has; default: as in the '
        'source'
    )
    add('--sample-size', type=cli.positive, help=help)
    help = 'leave this part of the blocks out, for the partial inheritance of t5 Tab. 10'
    add('--without', choices=('attention', 'mlp'), help=help)
    args = parser.parse_args()
    with cli.plain_errors():
        from mmvttt.convert import convert_checkpoint

        conversion = convert_checkpoint(**vars(args))
    print(conversion)
    if not conversion.complete:
        raise SystemExit(
            f'error: {len(conversion.missing)} tensors are missing and '
            f'{len(conversion.left_over)} are left over; nothing was written'
        )
    print(f'wrote {len(conversion.weights)} tensors to {args.target}')
    if conversion.caution:
        print(conversion.caution)


if __name__ == '__main__':
    main()
