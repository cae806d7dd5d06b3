"""Puts the stand-in GPU in place when Python starts with this folder on its path."""

import stand_in

stand_in.install()
