"""Files of `tools/export.py`: the parts of models that they hold, and models that they replace."""
