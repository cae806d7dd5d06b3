"""Analysis of models: costs, pictures of the inner training."""
