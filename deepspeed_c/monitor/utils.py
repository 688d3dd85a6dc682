"""Functions, under DeepSpeed's names, that check whether a monitor's package can be imported. Each raises
MissingPackageError, a subclass of ImportError, if it cannot.
"""

from __future__ import annotations

from .comet import MINIMUM
from .packages import load_package

__all__ = ["check_comet_availability", "check_tb_availability", "check_wandb_availability"]


def check_tb_availability() -> None:
    """Check the package tensorboard."""
    load_package("tensorboard", key="tensorboard")


def check_wandb_availability() -> None:
    """Check the package wandb."""
    load_package("wandb", key="wandb")


def check_comet_availability() -> None:
    """Check the package comet_ml and its version."""
    load_package("comet_ml", key="comet", minimum=MINIMUM)
