"""Stand-ins for a GPU, until one has run the kernels: all of their tests run by `make stress`.

`make test` runs one quick representative of the emulator, the rehearsal and the cycle model each.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
QUICK = (
    'test_every_proxy_fence_that_is_removed_is_found',
    'test_the_stand_in_refuses_what_a_gpu_refuses',
    'test_products_of_a_warp_group_are_bound_by_tensor_cores_and_fetch_their_operands',
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not item.name.startswith(QUICK):
            item.add_marker(pytest.mark.stress)
