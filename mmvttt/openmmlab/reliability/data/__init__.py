"""Data checks by format; `annotations.check_data` is the entry point."""
