"""Peak memory of a training step by kind."""
