"""Before any test module imports mmdet, mmvttt mends the stack, as it does for its users.

The tests of the kernels run without mmengine too, on a machine with torch and Triton alone.
"""

import importlib.util

if importlib.util.find_spec('mmengine'):
    import mmvttt  # noqa: F401
