"""Two nodes started with different arguments: all ranks stop, and name the difference."""

from pathlib import Path

from ...dist.launch import start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'small_config.py'


def test_nodes_with_different_rates_do_not_train(tmp_path: Path) -> None:
    each = [['--cfg-options', f'optim_wrapper.optimizer.lr={rate}'] for rate in (0.01, 0.02)]
    each = [['--work-dir', str(tmp_path / 'w'), *options] for options in each]
    for end in wait(start_nodes(CONFIG, tmp_path, each=each, processes=1), timeout=300):
        assert end.status == 1, end.text
        (line,) = [x for x in end.text.splitlines() if x.startswith('error: the nodes do not')]
        assert 'config.optim_wrapper.optimizer.lr is 0.01 on node' in line
        assert 'and 0.02 on node' in line
        assert '(rank 1)' in line
