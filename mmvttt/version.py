"""The version of mmvttt, read by setup.py without importing the package."""

__version__ = '0.2.0.dev0'
