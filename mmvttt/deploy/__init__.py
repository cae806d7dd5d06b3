"""Ways to deploy: inference on CPUs, CUDA graphs."""
