"""Methods of a host that runs all layers on each rank: forward, generation, and files of whole weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from deepspeed_c.engine.checkpoint.model_files import save_model
from deepspeed_c.engine.full_weights import FullWeights
from deepspeed_c.engine.weights import consolidate, named_tensors, save_weights
from deepspeed_c.transfer.target import SentWeights
from deepspeed_c.zero.weights.drivers.join import JoinMode
from deepspeed_c.zero.weights.wrappers import refuse_bytes_in_file

__all__ = ["WholeModel"]


class WholeModel:
    """Methods of an engine that runs all layers on each rank."""

    def _run(self, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's outputs, with autocast and with cast inputs if the configuration asks for them."""
        cast = self._precision.cast_inputs
        with self._precision.autocast(self.device), self._blocks.active((inputs, kwargs)):
            return self.module(*cast(inputs), **cast(kwargs))

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights in the dtype of training to one file. The file's suffix says whether ``torch.load`` or
        safetensors reads it.

        Collective at stage 3; rank 0 writes, one tensor at a time, and the file appears only when it is complete.
        Returns True. Raises CheckpointError on all ranks if the file cannot be written. It does not need
        ``stage3_gather_16bit_weights_on_model_save``, because the whole model is never in memory.
        """
        self._require_open()
        self._require_states("save_16bit_model")
        if not exclude_frozen_parameters:
            refuse_bytes_in_file(self.module, "save_16bit_model")
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
        """Writes the model in Hugging Face's layout: ``model.safetensors``, or files of at most ``max_shard_size`` with
        their index. It also writes config.json if the module has a configuration of transformers.
        ``AutoModel.from_pretrained(save_dir)`` reads the folder.

        Collective at every stage. Rank 0 writes, and no rank holds more than one gather unit of the model. ``dtype``:
        the dtype of floating-point parameters, default: the dtype in training; any other dtype is converted from the
        fp32 masters. A new folder appears when it is complete. In an existing folder the model is replaced and other
        files stay. Raises CheckpointError on all ranks if the model cannot be written; nothing is changed then.
        """
        self._require_open()
        self._require_states("save_model")
        if not exclude_frozen_parameters:
            refuse_bytes_in_file(self.module, "save_model")
        save_model(
            self.module,
            self._fetcher,
            self._mesh,
            save_dir,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen_parameters,
            dtype=dtype,
        )

    def iter_full_weights(
        self, bytes_ahead: int | str = "64MB", *, adapters: str = "merged", to: str = "all"
    ) -> FullWeights:
        """An iterator of (name, whole tensor) over all weights and buffers, for another engine.

        ```python
        for name, tensor in engine.iter_full_weights():
            other.load(name, tensor)
        ```

        Names and shapes are those of the model's files: transformers' where the module is one of its models. A tensor
        is valid until the next one is asked for; later reads of it raise StateError. At stage 3 the next tensors are
        gathered meanwhile, and a rank holds ``bytes_ahead`` beside its shard, or one gather unit if that is larger.
        Tied weights come under each of their names, one after the other, as one tensor; ``entries`` of the iterator
        says which are tied or frozen.

        adapters: what comes of a model of peft: "merged" (weights with the active adapters added), "apart" (the weights
        without them, then peft's names) or "only" (the adapters). to: the ranks that get tensors: "all", "rank0", or
        "each" (each tensor goes to one rank). Parts of tensor-parallel ranks are put together, and experts of all ranks
        come under their numbers.

        Collective where weights are sharded or cut: all ranks iterate, those without tensors too. A rank may leave its
        loop early. Raises ConfigError for arguments; StateError during a pass and, on all ranks that have not got all
        their tensors, where weights have changed since the iteration began; FeatureError for an adapter of quantized
        weights with "merged".
        """
        self._require_open()
        self._require_states("iter_full_weights")
        return FullWeights(self.module, self._fetcher, self._mesh, bytes_ahead=bytes_ahead, adapters=adapters, to=to)

    def send_weights(
        self,
        target: str | os.PathLike[str] | Callable[[str, torch.Tensor], Any] | torch.distributed.ProcessGroup | None,
        *,
        version: int | None = None,
        adapters: str = "merged",
        changed_only: bool = True,
        bytes_ahead: int | str = "64MB",
    ) -> SentWeights:
        """Sends the weights, as ``iter_full_weights`` gives them, from rank 0 to a receiver. Collective.

        target: a folder, which ``deepspeed_c.transfer.WeightsFolder`` reads; a function that is called with each name
        and tensor (valid during the call); or a process group of torch with rank 0 in it, whose other ranks call
        ``deepspeed_c.transfer.receive_weights``. Only rank 0's target counts.

        version: the number of what is sent; default: one more than the receiver's. changed_only: sends only tensors
        that have changed since the last call for this receiver, if it still has the version of that call. adapters,
        bytes_ahead: as ``iter_full_weights``.

        Raises on all ranks alike: StateError for a version that is not above the receiver's, and the error of a
        receiver: CheckpointError for a folder, CommError for a rank of a group that has failed or refused, the
        function's own exception on rank 0 and CommError on the others. The next call then sends all weights.
        """
        self._require_open()
        self._require_states("send_weights")
        return self._sender.send(
            target,
            lambda is_wanted: FullWeights(
                self.module,
                self._fetcher,
                self._mesh,
                bytes_ahead=bytes_ahead,
                adapters=adapters,
                to="rank0",
                is_wanted=is_wanted,
            ),
            named_tensors(self.module, exclude_frozen=False),
            version=version,
            adapters=adapters,
            changed_only=changed_only,
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
        """Calls the module's ``generate``, with weights that are gathered once for all tokens if there is room.

        ``engine.module.generate`` does the same where the module is a model of transformers: a *lease* makes all
        weights available, and no rank waits for another one until it ends. If all weights lie in joint memory
        (``comm.zero_copy_gather``), or on each rank (stages 0 to 2), the call is not collective. Otherwise the first
        call is collective; in evaluation mode the lease lasts until ``train()``, ``step``, a training forward or a
        load, and further calls are not collective. A rank without prompts passes prompts of zero rows.

        A model of more elements than ``stage3_max_live_parameters`` is gathered for each token. Each call is collective
        then, and ranks may make different numbers of tokens, as in ``synced_generation``. ``synced``: has no effect,
        because all calls are.

        Raises StateError, before a collective, in training mode with gradients enabled.
        """
        with self._generation.run(args, kwargs):
            return self.module.generate(*args, **kwargs)

    @contextmanager
    def synced_generation(self) -> Iterator[None]:
        """Context for ranks with different numbers of forwards, and of calls of ``generate``. A rank that has finished
        takes part in the gathers of the other ranks until all have finished, also if it raises. Forwards within it have
        no backward. Its end is collective.
        """
        with (
            self._generation.running(),
            self._fetcher.drivers.of(JoinMode).running() if self._shards_parameters else nullcontext(),
        ):
            yield
