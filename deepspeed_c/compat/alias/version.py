"""The version of DeepSpeed whose interface this package provides, with this package's version after the plus sign."""

from deepspeed_c._version import __version__

API_VERSION = f"0.19.6+c{__version__}"
