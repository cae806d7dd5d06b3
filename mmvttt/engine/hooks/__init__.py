"""Hooks of mmengine: checkpoints, anomalies, MESA, topology."""
