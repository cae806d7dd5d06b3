"""Analysis of models and runs: costs, pictures of the inner training, curves."""
