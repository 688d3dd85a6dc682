"""Configuration: DeepSpeed's JSON, checked at every depth, as immutable structs. Needs no torch."""

from .batch import Batch
from .config import Config
from .load import load_config, problems_of, read_config
from .resolve import ReadConfig

__all__ = ["Batch", "Config", "ReadConfig", "load_config", "problems_of", "read_config"]
