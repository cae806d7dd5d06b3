"""Ways to deploy: exported files and what runs them, frozen models for CPUs, CUDA graphs."""
