"""The version of the package, in one place: setup.py and ``deepspeed_c.__version__`` read it here."""

__version__ = "0.1.0"
