"""Configuration: DeepSpeed's JSON, checked at every depth, as immutable structs. Needs no torch."""

from .batch import Batch
from .config import Config
from .load import load_config, problems_of, sequence_parallel_size, tensor_parallel_size

__all__ = ["Batch", "Config", "load_config", "problems_of", "sequence_parallel_size", "tensor_parallel_size"]
