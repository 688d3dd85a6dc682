"""The version of DeepSpeed's interface that is answered, with ours behind the plus sign."""

from deepspeed_c._version import __version__

API_VERSION = f"0.19.6+c{__version__}"
