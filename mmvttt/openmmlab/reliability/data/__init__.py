"""Data checks by format; `paths.check_data` is the entry point."""
