"""Data loading: micro-batches from each rank's share of a data set. The position can be saved."""

from deepspeed_c.data.loader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
