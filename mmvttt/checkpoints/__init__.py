"""Checkpoints: reading, loading, whole files, resuming, publishing."""
