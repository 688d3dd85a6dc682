"""Data loading: each rank's share of a data set, in micro-batches, from a position that can be saved."""

from deepspeed_c.data.loader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
