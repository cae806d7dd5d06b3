"""mmengine looks for the registries of the scope `mmvttt` under this name."""

from .openmmlab.registry import *  # noqa: F403
