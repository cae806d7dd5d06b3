"""`mmvttt.cli` by its earlier name, for scripts that import it from here."""

from ..cli import *  # noqa: F403
