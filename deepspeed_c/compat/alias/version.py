"""The versions of DeepSpeed and MII whose interfaces this package provides, with this package's version after the plus
sign."""

from deepspeed_c._version import __version__

API_VERSION = f"0.19.6+c{__version__}"
MII_VERSION = f"0.3.3+c{__version__}"
