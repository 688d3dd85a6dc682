"""The interface through which DeepSpeed's engine writes the files of a checkpoint, and its implementation with torch.

Checkpoints here are written in their own way: ``engine.checkpoint_engine`` is for files of programs.
"""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_c.errors import CheckpointError

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]


@dataclass
class CheckpointCommitInfo:
    """A checkpoint about to be written: its tag, its folder, and whether ``latest`` names it afterwards."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """Writes and reads the files of a checkpoint: ``create``, any number of ``save``, ``commit``."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint is about to be written. Required."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file. Required."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file. Required."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called after the last ``save``. Return True when the files can be read. Required."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and those above it."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether this data-parallel rank writes data that all data-parallel ranks have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether ``save`` returns before the file is written."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """For an engine that is decoupled: gives the checkpoint to commit. Not required."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The last checkpoint given to ``set_commit_info``, until it is committed. Not required."""
        return None

    def cleanup(self) -> None:
        """The training engine ends. Not required."""

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so after ``load``."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """``torch.save`` and ``torch.load``: plain data and tensors; a file with other objects is refused."""

    def __init__(self, config_params: Any = None) -> None:
        """config_params: a ``DeepSpeedConfig``, whose ``checkpoint_serialization`` says whether files are zip archives;
        None: they are not.
        """
        super().__init__(config_params)
        self.name = type(self).__name__
        self.zipfile_serialization = (
            False if config_params is None else config_params.checkpoint_config["checkpoint_serialization"]
        )

    @classmethod
    def with_zip(cls, is_zip: bool) -> TorchCheckpointEngine:
        """An engine whose files are zip archives, or none."""
        made = cls()
        made.zipfile_serialization = is_zip
        return made

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: no preparation is needed."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path, _use_new_zipfile_serialization=self.zipfile_serialization)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What ``save`` wrote.

        Raises CheckpointError: the file holds objects of other classes, or is none of torch's.
        """
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"cannot be read as plain data and tensors: {reason}",
                where=path,
                fix="save it again without those objects; if you trust the file, torch.load(path, weights_only=False)",
            ) from error

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True
