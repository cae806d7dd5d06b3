"""Deployment: exported files and their runtimes, compilation, CUDA graphs."""
