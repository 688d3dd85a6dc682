"""Methods of a host whose ranks each run all layers: forward, generation, and files of whole weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from deepspeed_c.engine.checkpoint.model_files import save_model
from deepspeed_c.engine.weights import consolidate, save_weights

__all__ = ["WholeModel"]


class WholeModel:
    """A part of an engine."""

    def _run(self, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's outputs, under autocast and with cast inputs where the configuration says so."""
        cast = self._precision.cast_inputs
        with self._precision.autocast(self.device), self._blocks.active((inputs, kwargs)):
            return self.module(*cast(inputs), **cast(kwargs))

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights, in the dtype that is trained in, to one file that ``torch.load`` (or safetensors, by the
        suffix) reads.

        Collective at stage 3; rank 0 writes, one tensor at a time, and the file appears only when it is complete.
        Returns True. Raises CheckpointError on all ranks when it cannot be written. Needs no
        ``stage3_gather_16bit_weights_on_model_save``: nothing is ever whole in memory.
        """
        self._require_open()
        self._require_states("save_16bit_model")
        path = os.path.join(save_dir, save_filename)
        save_weights(self.module, self._fetcher, self._mesh, path, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def save_model(
        self,
        save_dir: str,
        max_shard_size: int | str = "5GB",
        exclude_frozen_parameters: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes the model as Hugging Face lays it out: ``model.safetensors``, or files of at most ``max_shard_size``
        and their index, and config.json where the module has a configuration of transformers.
        ``AutoModel.from_pretrained(save_dir)`` reads it.

        Collective, at every stage; rank 0 writes, and no rank holds more than one gather unit of the model. ``dtype``:
        of floating-point parameters, default: the dtype in training; another dtype is taken from the fp32 masters. A
        new folder appears when it is complete; in an old folder the model is replaced and other files stay. Raises
        CheckpointError on all ranks when it cannot be written; everything is as it was then.
        """
        self._require_open()
        self._require_states("save_model")
        save_model(
            self.module,
            self._fetcher,
            self._mesh,
            save_dir,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen_parameters,
            dtype=dtype,
        )

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The module's state dict of whole tensors in host memory on rank 0, None on the others. Collective;
        ValueError below stage 3."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO stage 3; below it module.state_dict() is whole")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        self._require_open()
        self._require_states("_consolidated_16bit_state_dict")
        return consolidate(
            self.module, self._fetcher, self._mesh, exclude_frozen=exclude_frozen_parameters, on_all_ranks=False
        )

    def generate(self, *args: Any, synced: bool = False, **kwargs: Any) -> Any:
        """Calls the module's ``generate``. ``synced``: ranks may stop after different numbers of forwards (see
        ``synced_generation``)."""
        self._require_open()
        generate = self.module.generate
        with self.synced_generation() if synced else nullcontext():
            before, self._is_generating = self._is_generating, True
            try:
                return generate(*args, **kwargs)
            finally:
                self._is_generating = before

    @contextmanager
    def synced_generation(self) -> Iterator[None]:
        """Context for ranks with different numbers of forwards: a rank that leaves it serves the others until all have
        left.

        Collective to enter. One forward in evaluation or training mode should have run before, so that the order of
        use is known; without it all gathered weights stay until each forward ends.
        """
        before, self._is_generating = self._is_generating, True
        try:
            with self._fetcher.synced() if self._shards_parameters else nullcontext():
                yield
        finally:
            self._is_generating = before
