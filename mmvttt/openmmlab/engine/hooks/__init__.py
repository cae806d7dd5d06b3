"""Hooks of mmengine: compilation, averages of weights, MESA, inner loops."""
