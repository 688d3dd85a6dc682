"""The changes that an engine makes to a user's model (edits). Each edit is a row of a table. They are made in the order
of the table and undone in reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.axes import SP, TP, WITHIN_STAGE
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
from deepspeed_c.config.parallel import HybridEngine, TensorParallel
from deepspeed_c.engine.generate import Generation
from deepspeed_c.engine.group_generation import GroupGeneration
from deepspeed_c.engine.precision import DTYPES, dtype_of_weights
from deepspeed_c.engine.products import take_over_products
from deepspeed_c.engine.same_bits import Arithmetic, hold_arithmetic
from deepspeed_c.env import read_env
from deepspeed_c.errors import ModelError
from deepspeed_c.inject import cut_model
from deepspeed_c.inject.alike import raised_on_all
from deepspeed_c.inject.kernels import inject_as_asked, revert_kernels
from deepspeed_c.logging import log_dist
from deepspeed_c.moe.balance import LoadBalance
from deepspeed_c.recompute.blocks import Blocks
from deepspeed_c.recompute.budget import BudgetRole
from deepspeed_c.recompute.recomputer import parked
from deepspeed_c.sequence.adopt import SharedAttention, take_over_attention
from deepspeed_c.sequence.tiles_auto import TiledModel, tile_model
from deepspeed_c.zero.layout.cuts import check_cuts, read_marks, take_sums_over, tensor_cut_of
from deepspeed_c.zero.layout.layout import Layout, gather_for_good
from deepspeed_c.zero.weights.code_layers import take_over_layers
from deepspeed_c.zero.weights.hooks import ModuleHooks
from deepspeed_c.zero.weights.wrappers import unwrap_weights

__all__ = ["EDITS", "EditContext", "Edits", "ModelEdit", "need_of_plain_weights"]


@dataclass(frozen=True)
class EditContext:
    """The inputs of an edit."""

    config: Config
    mesh: Mesh
    layout: Layout | None = None
    """None before the model's weights are laid out in units."""
    stages: Sequence[str] = ("",)
    """Names of the parts of the model that a rank runs separately; a single empty name stands for the whole model."""
    name_of_pass: Callable[[], str] = lambda: "train"
    """Returns "train" or "eval". Gathers have one plan for each."""
    generation: Generation | None = None
    """The generation of the engine that gets the model; None where no engine is made."""
    trains: bool = True
    """False for inference: a model without a module that has a kernel stays as it is, and the log has totals in place
    of lists."""
    injection_policy: Mapping[type, Sequence[str]] | None = None
    """The caller's rules of the cut, in place of those of the model's family."""


class Made(Protocol):
    """An edit that has been made."""

    def close(self) -> None:
        """Undoes the edit."""


@dataclass(frozen=True)
class ModelEdit:
    """A row of the table."""

    name: str
    wanted: Callable[[EditContext], bool]
    apply: Callable[[torch.nn.Module, EditContext], Made | None]
    """Makes the edit. Returns None if the edit is permanent."""
    after: tuple[str, ...] = ()
    """Names of edits that must be made before this one, if both are wanted."""
    needs_layout: bool = True
    """Whether the edit is made after the weights have been laid out in units; otherwise it is made before, on whole
    weights."""


class _Undo:
    def __init__(self, undo: Callable[[], Any]) -> None:
        self._undo = undo

    def close(self) -> None:
        self._undo()


def _unwrap_weights(model: torch.nn.Module, context: EditContext) -> Made | None:
    undo = unwrap_weights(model, dtype_of_weights(context.config.fp16, context.config.bf16))
    return None if undo is None else _Undo(undo)


def _group_generation(model: torch.nn.Module, context: EditContext) -> GroupGeneration:
    section = context.config.hybrid_engine
    return GroupGeneration(model, context.mesh, section.inference_tp_size, section.tp_gather_partition_size)


def _inject_kernels(model: torch.nn.Module, context: EditContext) -> Made | None:
    try:
        report = inject_as_asked(model, context.config.tensor_parallel)
    except ModelError as error:
        if context.trains:
            raise
        log_dist(f"replace_with_kernel_inject: {type(model).__name__} runs as it is: {error.what}", ranks=[0])
        return None
    log_dist(f"kernels:\n{report}" if context.trains else f"kernels: {report.summary}", ranks=[0])
    return _Undo(partial(revert_kernels, model))


def _cut_tensors(model: torch.nn.Module, context: EditContext) -> None:
    """Cuts a whole model over the tensor-parallel ranks if the configuration asks for it. If the model has been cut
    already, finds out how."""
    section, tp, stages = context.config.tensor_parallel, context.mesh.tensors, context.mesh.pipeline
    with raised_on_all(stages, "cuts of parameters"):
        check_cuts(model, tp)
    # A model may be cut by hand in some pipeline stages only.
    is_cut = any(stages.gather_objects(any(tensor_cut_of(param) is not None for param in model.parameters())))
    if max(section.autotp_size, section.tp.tp_size) > 1 and not is_cut:
        gather_for_good(model)  # rules need whole weights; the stage shards their parts later
        report = cut_model(model, section, tp, context.injection_policy, stages=stages)
        told = f"\n{report}" if context.trains else f" {report.summary}"
        log_dist(f"tensor parallelism:{told}", ranks=[0])
    take_sums_over(model)
    with raised_on_all(stages, "marks of parameters"):
        read_marks(model, tp)


def _share_attention(model: torch.nn.Module, context: EditContext) -> SharedAttention | None:
    ranks_of_host = read_env().local_world_size or context.mesh.comm.world_size
    return take_over_attention(model, context.mesh, context.config.sequence_parallel, ranks_of_host=ranks_of_host)


def _tile(model: torch.nn.Module, context: EditContext) -> TiledModel:
    return tile_model(model, context.mesh.size(TP))


def _recompute(model: torch.nn.Module, context: EditContext) -> Blocks:
    config, mesh = context.config, context.mesh
    return Blocks(
        model,
        parked(config.activation_checkpointing, wanted=config.sequence_parallel.offload_activations),
        mesh.tensors,
        has_sharded=_has_fetcher(context),
        aio=config.aio,
        ranks=mesh.comm,
        role=BudgetRole(
            _recomputing_peers(context), context.stages, is_first=not any(mesh.index(axis) for axis in WITHIN_STAGE)
        ),
    )


def _recomputing_peers(context: EditContext) -> Collectives | None:
    """The ranks that must recompute the same layers, because the layers contain collectives. None: each rank may choose
    for itself.

    Parts of sequences are exchanged by collectives that look like the caller's own and may run along any axis.
    """
    if context.config.activation_checkpointing.budget is None:
        return None
    if context.mesh.size(SP) > 1:
        return context.mesh.comm
    if _has_fetcher(context):
        return context.mesh.stage
    return context.mesh.tensors if context.mesh.size(TP) > 1 else None


def _has_fetcher(context: EditContext) -> bool:
    return context.layout is not None and context.layout.fetcher is not None


def _gather(model: torch.nn.Module, context: EditContext) -> Made:
    hooks = ModuleHooks([model], context.layout.fetcher, context.name_of_pass)
    return _Undo(hooks.remove)


def _watch_generation(model: torch.nn.Module, context: EditContext) -> Made:
    return _Undo(context.generation.watch(model))


def _computes_on_cpu(context: EditContext) -> bool:
    return context.config.cpu_products == "auto" and get_accelerator().device_name() == "cpu"


def _configured_dtypes(context: EditContext) -> list[torch.dtype]:
    """The 16-bit dtypes that the configuration turns on."""
    config = context.config
    sections = (("fp16", config.fp16), ("bf16", config.bf16), (config.torch_autocast.dtype, config.torch_autocast))
    return [DTYPES[name] for name, section in sections if section.enabled]


def _take_over_products(model: torch.nn.Module, context: EditContext) -> Made:
    dtypes, asks_no_clock = _configured_dtypes(context), context.config.same_bits.enabled
    return _Undo(take_over_products(model, dtypes, context.mesh.comm, asks_no_clock=asks_no_clock))


def _has_same_bits(context: EditContext) -> bool:
    return context.trains and context.config.same_bits.enabled


def _hold_arithmetic(model: torch.nn.Module, context: EditContext) -> Arithmetic:
    section, grain = context.config.same_bits, context.config.batch.micro_batch_size
    return hold_arithmetic(grain, section.threads, _configured_dtypes(context), context.mesh.comm)


def _take_over_codes(model: torch.nn.Module, context: EditContext) -> Made:
    return _Undo(take_over_layers(model, torch.device(get_accelerator().current_device_name())))


def need_of_plain_weights(mesh: Mesh, tensors: TensorParallel, hybrid: HybridEngine) -> str:
    """The setting that reads weights as plain tensors before they are laid out; "" for none."""
    settings = {
        "tensor parallelism": mesh.size(TP) > 1,
        "replace_with_kernel_inject": tensors.replace_with_kernel_inject,
        "inference_tp_size": hybrid.enabled and hybrid.inference_tp_size > 1,
    }
    return next((name for name, is_on in settings.items() if is_on), "")


EDITS: tuple[ModelEdit, ...] = (
    ModelEdit("codes", wanted=lambda context: True, apply=_take_over_codes, needs_layout=False),
    ModelEdit("wrapper weights", wanted=lambda context: True, apply=_unwrap_weights, needs_layout=False),
    ModelEdit("products", wanted=_computes_on_cpu, apply=_take_over_products, needs_layout=False),
    ModelEdit("arithmetic", wanted=_has_same_bits, apply=_hold_arithmetic, after=("products",), needs_layout=False),
    ModelEdit(
        "group generation",
        wanted=lambda context: (
            context.config.hybrid_engine.enabled and context.config.hybrid_engine.inference_tp_size > 1
        ),
        apply=_group_generation,
        needs_layout=False,
    ),
    ModelEdit(
        "kernels",
        wanted=lambda context: context.config.tensor_parallel.replace_with_kernel_inject,
        apply=_inject_kernels,
        after=("group generation",),
        needs_layout=False,
    ),
    ModelEdit("tensor cut", wanted=lambda context: True, apply=_cut_tensors, after=("kernels",), needs_layout=False),
    ModelEdit(
        "attention",
        wanted=lambda context: context.mesh.size(SP) > 1,
        apply=_share_attention,
        after=("tensor cut",),
    ),
    ModelEdit(
        "tiles",
        wanted=lambda context: context.config.sequence_parallel.tiles == "auto",
        apply=_tile,
        after=("kernels", "tensor cut"),
    ),
    ModelEdit("recomputation", wanted=lambda context: True, apply=_recompute, after=("attention", "tiles")),
    ModelEdit("gathering", wanted=_has_fetcher, apply=_gather, after=("recomputation",)),
    ModelEdit(
        "load balance",
        wanted=lambda context: (
            context.config.expert_parallel.enabled and context.config.expert_parallel.load_balance_coeff is not None
        ),
        apply=lambda model, context: LoadBalance(
            model, context.config.expert_parallel.load_balance_coeff, context.mesh.tokens
        ),
    ),
    ModelEdit(
        "generation",
        wanted=lambda context: context.generation is not None,
        apply=_watch_generation,
        after=("tensor cut", "attention"),
    ),
)
"""Codes and wrapper weights come first, because all else works on plain memory. Arithmetic is probed with the products
that the model will have. The copy for group generation is made before other edits of forwards, because an edited
forward refers to the model that was edited. Kernels are injected before weights are cut, because they compare a
module's own forward with theirs. Recomputation comes after tiles and shared attention, because it runs everything
within a layer again. Gathers are outermost: they happen once for each run of a layer."""


class Edits:
    """Holds the edits of one model until ``close``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._made: dict[str, Made] = {}

    def make(self, context: EditContext) -> None:
        """Makes the wanted edits that have not been made yet. Called before and after the weights are laid out.

        If it raises, the caller calls ``close``, which undoes the edits made so far.
        """
        for edit in EDITS:
            is_due = edit.needs_layout == (context.layout is not None)
            if is_due and edit.name not in self._made and edit.wanted(context):
                made = edit.apply(self._model, context)
                if made is not None:
                    self._made[edit.name] = made

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def get(self, name: str) -> Any:
        """The edit, or None if it is not made."""
        return self._made.get(name)

    def undo(self, name: str) -> None:
        """Undoes one edit, if it is made."""
        made = self._made.pop(name, None)
        if made is not None:
            made.close()

    def close(self) -> None:
        """Undoes all edits, the last one first. An error in one edit does not prevent the others from being undone."""
        with ExitStack() as stack:
            for made in self._made.values():
                stack.callback(made.close)
            self._made.clear()
