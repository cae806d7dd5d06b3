#!/usr/bin/env python3
"""Lists the published weights, or downloads them (mmvttt.checkpoints.published).

MMVTTT_WEIGHTS names a folder with NAME.pth or NAME.safetensors, or the address of a mirror that is
asked instead of the authors'.

example: mmvttt weights
         mmvttt weights maskrcnn_hvit3_t_1x hvit3_t_mesa_in1k
"""

from mmvttt import cli
from mmvttt.text import one_line


def main() -> None:
    parser = cli.command_line(__doc__)
    help = 'weights to download; none: list all of them'
    parser.add_argument('names', nargs='*', metavar='NAME', help=help)
    names = parser.parse_args().names
    with cli.plain_errors(stopped='stopped; the same command continues it'):
        from mmvttt.checkpoints.published import SCHEME, listing, published

        rows = [published(name) for name in names]
        if not rows:
            print(listing())
            return
        # Needs NumPy and Pillow.
        from mmvttt.checkpoints.sources import find_source

        for row in rows:
            source = find_source(f'{SCHEME}{row.name}').intact()
            by = f' (by {row.authors}, {row.licence})' if row.authors else ''
            print(one_line(f'{row.name}: {source.files[0]}{by}'))


if __name__ == '__main__':
    main()
