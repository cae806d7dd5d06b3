#!/usr/bin/env python3
"""Draws where a model looks and what its inner models learn: pictures and a CSV for each.

--what chooses:
  erf        effective receptive fields of the last map and the FPN's levels; any model
  gmm        gradient magnitude of each patch, and the 30 % of the largest
  loss       inner loss along the tokens (Vittt), or before and after the step (ViT³, T⁵)
  state      drift, rank and learning rate of the inner models; where in the image they move
  attention  implicit attention of chosen patches, and how far it reaches; timm's ViTs too
  keys       key shift, by which to decide about a key norm; timm's ViTs too

example: mmvttt inspect_model vittt_t_in1k photo.jpg --checkpoint vittt.pth --what erf gmm
"""

from pathlib import Path

from mmvttt import cli
from mmvttt.text import one_line


def main() -> None:
    parser = cli.command_line(__doc__)
    add = parser.add_argument
    add('model', help='a config file, the name of a shipped one, or a timm model')
    add('images', nargs='+', type=Path)
    add('--checkpoint', help='the weights; default: from init_cfg, or random')
    add('--key', help="entry of the checkpoint with the weights, e.g. 'teacher'")
    cli.add_shape(parser)
    add('--out', type=cli.new_folder, default='work_dirs/inspect')
    cli.add_cfg_options(parser, 'model.backbone.arch=base')
    names = ('erf', 'gmm', 'loss', 'state', 'attention', 'keys')
    add('--what', nargs='+', choices=names, default=names, help='default: all')
    axes = dict(nargs=2, type=float, metavar=('Y', 'X'))
    help = (
        'place of a patch for --what attention, from 0 to 1; may be given again; default: 0.5 0.5'
    )
    add('--query', action='append', help=help, **axes)
    args = parser.parse_args()
    with cli.plain_errors():
        from mmvttt.analysis.inspect import inspect_model
        from mmvttt.analysis.look import Look
        from mmvttt.by_name import load_model
        from mmvttt.errors import UsageError

        found = load_model(args.model, args.cfg_options, args.checkpoint, args.key)
        if found.config is not None:
            from mmvttt.openmmlab.models import diffusion_model as diffusion

            if isinstance(found.model, diffusion.DiffusionModel):
                raise UsageError(diffusion.TAKES_NO_PHOTOGRAPHS)
        look = Look(
            found.model,
            args.images,
            tuple(args.shape or found.size),
            Path(args.out),
            found.prepare,
            tuple(args.query or [(0.5, 0.5)]),
        )
        for path in inspect_model(look, args.what):
            print(one_line(f'wrote {path}'))


if __name__ == '__main__':
    main()
