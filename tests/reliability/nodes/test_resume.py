"""Two nodes whose work directories differ: all ranks stop, and name what each lacks."""

from pathlib import Path

import pytest
import torch

from ...dist.launch import start_nodes, wait

CONFIG = Path(__file__).parents[2] / 'dist' / 'small_config.py'


@pytest.mark.parametrize(
    ('owner', 'found', 'remedy'),
    [('a', "lacks '{}/b/epoch_1.pth'", 'copy the file there'), ('b', "has '{}/b/", 'NODE_RANK=0')],
)
def test_a_file_that_one_node_lacks_stops_all(
    owner: str, found: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / owner).mkdir()
    # A checkpoint that could be resumed from, as far as can be seen before it is loaded.
    content = dict(meta=dict(epoch=1, iter=4), state_dict={'w': torch.ones(9)}, message_hub={})
    torch.save(content, tmp_path / owner / 'epoch_1.pth')
    each = [['--work-dir', str(tmp_path / name)] for name in 'ab']
    nodes = start_nodes(CONFIG, tmp_path, '--resume', each=each, processes=1)
    # Neither waits for the other until a time-out: both end by themselves.
    for end in wait(nodes, timeout=300):
        assert end.status == 1, end.text
        (line,) = [x for x in end.text.splitlines() if x.startswith('error: ')]
        assert f'(rank 1) {found.format(tmp_path)}' in line
        assert remedy in line
