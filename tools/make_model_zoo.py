"""Writes the tables of the model zoo into documents, from configs/metafile.yml.

See mmvttt.analysis.model_zoo.

example: python tools/make_model_zoo.py docs/model_zoo.md
"""

import argparse

from mmvttt.analysis.model_zoo import recount, update
from mmvttt.cli import command_line, plain_errors


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument('documents', nargs='+', help='files with <!-- model-zoo:… --> markers')
    parser.add_argument(
        '--check', action='store_true', help='change nothing; fail where something would change'
    )
    parser.add_argument(
        '--recount',
        action='store_true',
        help='count all models as their papers do, into configs/metafile.yml, first (minutes)',
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        if args.recount:
            recount()
        changed = [document for document in args.documents if update(document, args.check)]
    for document in args.documents:
        state = 'up to date'
        if document in changed:
            state = 'out of date' if args.check else 'written'
        print(f'{document}: {state}')
    if args.check and changed:
        raise SystemExit(1)


if __name__ == '__main__':
    main()
