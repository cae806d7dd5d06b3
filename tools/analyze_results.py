"""Draws what a tested model gets wrong (mmvttt.analysis.results).

A confusion matrix; of a detector also precision over recall with COCO's types of errors, for every
class, of boxes and of masks. The predictions are what `tools/test.py … --out FILE.pkl` writes.

example: python tools/analyze_results.py configs/maskrcnn_vittt_demo.py work_dirs/demo/test.pkl
"""

import argparse
from pathlib import Path

from mmvttt.analysis.results import analyze
from mmvttt.cli import add_cfg_options, add_config, command_line, plain_errors
from mmvttt.config import load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('predictions', help='the .pkl file of tools/test.py --out')
    parser.add_argument('--out', help='folder of the pictures; default: beside the predictions')
    parser.add_argument(
        '--score-thr',
        type=float,
        default=0.3,
        help='lowest score in the confusion matrix; default: 0.3',
    )
    add_cfg_options(parser, 'test_dataloader.dataset.data_root=PATH')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    out = args.out or Path(args.predictions).parent / 'analysis'
    with plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        pictures = analyze(config, args.predictions, out, args.score_thr)
    print('\n'.join(str(path) for path in pictures))


if __name__ == '__main__':
    main()
