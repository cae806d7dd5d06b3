"""Lists the content of a checkpoint: entries, classes, tensors, parameters of each part.

See mmvttt.checkpoints.publish.

example: mmvttt checkpoint_info work_dirs/vittt_s_in1k/epoch_300.pth --depth 3
"""

from mmvttt import cli


def main() -> None:
    parser = cli.command_line(__doc__)
    parser.add_argument('checkpoint', help='a file, URL or name on a hub')
    help = 'levels of modules to list; default: 2'
    parser.add_argument('--depth', type=cli.positive, default=2, help=help)
    args = parser.parse_args()
    with cli.plain_errors():
        from mmvttt.checkpoints.publish import describe_checkpoint

        print(cli.printable(describe_checkpoint(args.checkpoint, args.depth)))


if __name__ == '__main__':
    main()
