"""mmengine looks for the registries of the scope `mmvttt` in a module of this name."""

from .openmmlab.registry import *  # noqa: F403
