"""Generation by groups of ranks that train the same weights: each rank of a group computes a part of the layers, for
the prompts of all ranks of the group (``hybrid_engine.inference_tp_size``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c.comm.axes import DATA
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.cached_generation import generate_in_blocks
from deepspeed_c.engine.group_batch import GroupBatch, request_of
from deepspeed_c.engine.prompts import prompts_of
from deepspeed_c.errors import CommError, ConfigError, DeepSpeedCError, FeatureError, ModelError, StateError
from deepspeed_c.inject.part_copy import PartCopy
from deepspeed_c.logging import log_dist
from deepspeed_c.zero.weights.drivers.lease import Lease, read_in_turns
from deepspeed_c.zero.weights.fetch import Fetcher

__all__ = ["GroupGeneration", "generates"]

_KEY = "hybrid_engine.inference_tp_size"


def generates(module: torch.nn.Module) -> bool:
    """Whether it is a model of transformers, or a wrapper of one, with a ``generate``: it also prepares inputs. The
    ``generate`` of other modules may mean anything."""
    return callable(getattr(type(module), "generate", None)) and hasattr(type(module), "prepare_inputs_for_generation")


class GroupGeneration:
    """A copy of a model, cut over groups of neighbouring ranks, with which the ranks of a group generate together."""

    def __init__(self, model: torch.nn.Module, mesh: Mesh, n_ranks: int, n_units_a_turn: int) -> None:
        """mesh: the ranks of training. n_ranks: ranks of a group. n_units_a_turn: gather units that are whole at a time
        while shards are read.

        Collective. Raises ConfigError, FeatureError or ModelError where ranks or model cannot be divided so.
        """
        self._everyone, self._comm = mesh.comm, _group_of(mesh, n_ranks)
        _require_decoder(model)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._params = list(model.parameters())
        self._copy = PartCopy(model, self._comm)
        self._n_units_a_turn = n_units_a_turn
        self._n_writes: int | None = None  # of the fetcher when parts of shards were read
        self.taken_s = 0.0
        """Seconds that the copy has waited for its weights, in all calls."""
        log_dist(f"generation over {n_ranks} ranks: {self._copy.report.summary}", ranks=[0])

    def generate(
        self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], fetcher: Fetcher | None
    ) -> torch.Tensor:
        """``model.generate(*args, **kwargs)`` for the prompts of all ranks of the group in one batch. Returns the rows
        of this rank. ``model``: a module of the model in training. ``fetcher``: of its shards; None without shards.

        Collective over the group; over all ranks if parts of shards are read. Raises the errors of ``request_of`` and
        ``GroupBatch``, and StateError where another rank has refused its prompts.
        """
        part = self._copy.module.get_submodule(self._names[id(model)])
        try:
            request, shared = request_of(model, part.generate, args, kwargs)
        except DeepSpeedCError as error:
            self.refuse(error, fetcher)
            raise
        requests = self._comm.gather_objects(request, label="prompts")
        error: DeepSpeedCError | None = None
        try:
            _raise_refusal(requests, self._comm)
            batch = GroupBatch(model, requests, self._comm.rank, shared)
        except DeepSpeedCError as found:
            error = found
        self._agree_to_read(error, fetcher)
        if error is not None:
            raise error
        began = time.perf_counter()
        self._take(fetcher)
        self.taken_s += time.perf_counter() - began
        own = prompts_of(args, kwargs)
        if not batch.n_rows:
            return own
        prompts, mask = batch.prompts(own.device)
        kwargs = {"inputs": prompts, "attention_mask": mask, **batch.kwargs}
        return batch.own_part(generate_in_blocks(part, part.generate, (), kwargs))

    def refuse(self, error: DeepSpeedCError, fetcher: Fetcher | None) -> None:
        """Tells the ranks that wait for this rank that it does not generate."""
        self._comm.gather_objects(str(error), label="prompts")
        self._agree_to_read(error, fetcher)

    def _agree_to_read(self, error: DeepSpeedCError | None, fetcher: Fetcher | None) -> None:
        """Before a read of shards, in which all ranks take part: raises StateError where a rank of another group has an
        error. An error of this rank's own group is raised by the caller."""
        if self._is_read(fetcher):
            return
        answers = self._everyone.gather_objects(None if error is None else str(error), label="agree to generate")
        if error is None:
            _raise_refusal(answers, self._everyone)

    def _is_read(self, fetcher: Fetcher | None) -> bool:
        """Whether no shards have to be read: weights are whole somewhere, or parts of the newest shards are here."""
        return fetcher is None or not fetcher.is_collective or self._n_writes == fetcher.n_writes

    def _take(self, fetcher: Fetcher | None) -> None:
        """Gives the copy its weights. Whole weights, and weights in joint memory, are read where they lie. Of shards
        each rank gathers a few units at a time, and keeps its parts until ``drop``."""
        self._copy.follow()
        if fetcher is None or (not fetcher.is_collective and fetcher.drivers.of(Lease).begin()):
            self._copy.take(self._params, copies=False)
            return
        if self._n_writes == fetcher.n_writes:
            return
        in_turns: set[torch.nn.Parameter] = set()

        def read(params: list[torch.nn.Parameter]) -> None:
            self._copy.take(params, copies=True)
            in_turns.update(params)

        read_in_turns(fetcher, self._n_units_a_turn, read)
        self._copy.take([param for param in self._params if param not in in_turns], copies=False)
        self._n_writes = fetcher.n_writes

    def drop(self) -> None:
        """Lets go of the weights."""
        self._copy.drop()
        self._n_writes = None

    def close(self) -> None:
        """Frees the copy's weights. As an edit of the model."""
        self.drop()


def _raise_refusal(answers: Sequence[Any], comm: Collectives) -> None:
    """Raises StateError if one of the ranks' answers is the text of an error."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise StateError(
                f"rank {comm.global_ranks[rank]}, with which this rank generates, has refused: {answer}",
                where="generate",
                fix="mend the call of that rank",
            )


def _group_of(mesh: Mesh, n_ranks: int) -> Collectives:
    """The neighbours that generate together with this rank."""
    if mesh.size(*DATA) != mesh.comm.world_size:
        raise FeatureError(
            f"ranks that share samples in training cannot be divided anew for generation: the mesh has {mesh}",
            where=_KEY,
            fix="set it to 1; a model that is cut for training generates on its tensor-parallel ranks",
        )
    try:
        return Mesh(mesh.comm).split_tensors(n_ranks).tensors
    except CommError as error:
        raise ConfigError(error.what, where=_KEY, fix=error.fix) from error


def _require_decoder(model: torch.nn.Module) -> None:
    """Raises ModelError or FeatureError unless ``model`` generates from prompts alone, with the same weights on all
    ranks."""
    makers = [module for module in model.modules() if generates(module)]
    if not makers:
        raise ModelError(
            f"{type(model).__name__} holds no model of transformers that generates",
            where=_KEY,
            fix="set it to 1; engine.generate calls the model's own generate",
        )
    if any(getattr(getattr(module, "config", None), "is_encoder_decoder", False) for module in makers):
        raise FeatureError(f"{type(model).__name__} has an encoder", where=_KEY, fix="set it to 1")
    name = next((name for name, param in model.named_parameters() if not getattr(param, "allreduce", True)), None)
    if name is not None:
        raise FeatureError("an expert of this rank alone cannot be cut", where=f"{_KEY}: {name}", fix="set it to 1")
