"""The version of the package, read by setup.py and written into checkpoints."""

__version__ = "0.1.0"
