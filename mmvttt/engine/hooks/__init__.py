"""Hooks of mmengine: checkpoints, anomalies, MESA, compilation, topology, inner loops."""
