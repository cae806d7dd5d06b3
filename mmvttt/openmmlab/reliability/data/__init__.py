"""Checks of data, by its format; `paths.check_data` is the way in."""
