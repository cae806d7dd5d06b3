"""Deployment: exported files and their runtimes, frozen models for CPUs, CUDA graphs."""
