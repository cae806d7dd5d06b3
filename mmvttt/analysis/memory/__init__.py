"""The peak memory of a training step, by what takes it."""
