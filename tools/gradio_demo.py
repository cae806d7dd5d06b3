"""Serves a page in the browser that shows the predictions of a trained model.

Needs pip install 'mmvttt[gradio]'. Only this machine can open the page, unless --host is given.

example: python tools/gradio_demo.py configs/maskrcnn_vittt_demo.py work_dirs/demo/epoch_4.pth
"""

import argparse
from pathlib import Path

from mmvttt.cli import add_cfg_options, add_config, add_device, command_line, plain_errors, positive
from mmvttt.openmmlab.apis.page import build_page
from mmvttt.openmmlab.config import load_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_config(parser)
    parser.add_argument('checkpoint', help='file with the weights')
    parser.add_argument('--host', default='127.0.0.1', help='default: 127.0.0.1')
    parser.add_argument('--port', type=positive, default=7860, help='default: 7860')
    add_device(parser)
    add_cfg_options(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with plain_errors():
        config = load_config(args.config, cfg_options=args.cfg_options)
        page = build_page(config, args.checkpoint, Path(args.config).stem, args.device)
    page.launch(server_name=args.host, server_port=args.port, max_file_size='50mb')


if __name__ == '__main__':
    main()
