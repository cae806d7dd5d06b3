"""The version of mmvttt, read by setup.py without importing the package."""

__version__ = '1.0.0rc1'
