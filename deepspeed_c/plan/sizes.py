"""The planner's data about a model and its optimizer: parameters in order of registration, and bytes of state per
element."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from deepspeed_c.errors import ModelError, OptimizerError
from deepspeed_c.inject.cut import Cut, keep_part
from deepspeed_c.ops import q8
from deepspeed_c.ops.scope import declaration
from deepspeed_c.zero.layout.cuts import cut_of, mark_tied, tied_over
from deepspeed_c.zero.layout.experts import expert_ranks_of, mark_stack
from deepspeed_c.zero.layout.leaf import is_leaf
from deepspeed_c.zero.states.entries import must_see_pieces
from deepspeed_c.zero.weights.kinds import is_codes
from deepspeed_c.zero.weights.param import shape_of, state_of
from deepspeed_c.zero.weights.wrappers import byte_sizes

__all__ = [
    "ModelSizes",
    "OptimizerSizes",
    "ParamSize",
    "PipelineSizes",
    "StateSize",
    "group_sizes",
    "guess_layers",
    "model_of",
    "sizes_of",
    "stack_of",
]

# Elements of the tensor that an unknown optimizer is tried on.
PROBE_ELEMS = 64


class ParamSize(NamedTuple):
    """One parameter."""

    name: str  # the path of the module that reads the parameter, a dot, and the parameter's own name
    numel: int
    dtype: torch.dtype  # dtype when it is passed to ``initialize``
    group: int | None = 0  # optimizer group; None: frozen
    comm_dtype: torch.dtype | None = (
        None  # dtype in which its gradient is sent, if the configuration alone does not determine it
    )
    cut: Cut | None = None  # over tensor-parallel ranks, or over those of a stack's experts; ``numel`` counts one part
    n_expert_ranks: int = 1  # ranks that each hold such a parameter of other experts; 1: no expert's
    n_tied: int = 1  # ranks of a pipeline that hold the same parameter, in layers that share it

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def logical_numel(self) -> int:
        """Elements of all ranks that hold a part of the cut parameter."""
        return self.numel if self.cut is None else self.cut.logical_shape.numel()


class PipelineSizes(NamedTuple):
    """A rank's part of a pipeline's batch."""

    actions: tuple[tuple[int, int, int], ...]  # (kind, stage, micro-batch), as the rank runs them
    layers: dict[int, tuple[str, ...]]  # names of the modules of each of the rank's stages, in order
    n_stages: int  # of the whole pipeline
    n_ranks: int  # of the pipeline
    n_micro_batches: int


class ModelSizes(NamedTuple):
    """The properties of a model that determine its memory."""

    params: tuple[ParamSize, ...]  # each parameter once, in order of registration
    buffer_bytes: int = 0
    is_sharded: bool = False  # built under ``zero.Init``
    leaves: frozenset[str] = frozenset()  # modules that stage 3 gathers as one piece
    n_tensor: int = 1  # number of tensor-parallel ranks; the plan is for the first
    pipeline: PipelineSizes | None = None  # None: the model is whole, and micro-batches run one after the other

    @property
    def numel(self) -> int:
        """Elements with the experts of all ranks."""
        return sum(p.numel * p.n_expert_ranks for p in self.params)

    @property
    def n_trained(self) -> int:
        return sum(p.numel * p.n_expert_ranks for p in self.params if p.group is not None)

    @property
    def n_held(self) -> int:
        """Elements without the experts of other ranks."""
        return sum(p.numel for p in self.params)


class StateSize(NamedTuple):
    """One value of optimizer state per element."""

    dtype: torch.dtype | None  # None: the masters' dtype
    block_elems: int = 0  # elements that share an fp32 scale in a separate tensor; 0: no scales

    def tensors(self, numel: int, master_dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
        """(dtype, elements) of the tensors that hold the value for a piece of ``numel`` elements."""
        values = [(self.dtype or master_dtype, numel)]
        return [*values, (torch.float32, -(-numel // self.block_elems))] if self.block_elems else values

    def tensor_bytes(self, numel: int, master_dtype: torch.dtype) -> list[int]:
        """Bytes of the tensors of ``tensors``."""
        return [n * dtype.itemsize for dtype, n in self.tensors(numel, master_dtype)]


class OptimizerSizes(NamedTuple):
    """The states and copies of an optimizer, by group."""

    name: str
    states: tuple[tuple[StateSize, ...], ...]  # by group
    is_fused: bool  # reads gradients in any dtype, without temporaries
    sees_slices: bool  # whether state covers whole slices of buckets with padding, or each parameter's piece
    matrix_groups: frozenset[int] = frozenset()  # groups whose matrices are gathered whole in the step
    update_bytes: Callable[..., int] | None = None  # for a fused optimizer: additional bytes for the update of a bucket

    def layout_of_state(self, group: int, param: torch.Tensor) -> dict[str, tuple[torch.dtype, int]]:
        """The tensors of the state of ``param``: name -> (dtype, elements)."""
        found = (tensor for state in self.states[group] for tensor in state.tensors(param.numel(), param.dtype))
        return {str(i): tensor for i, tensor in enumerate(found)}


def guess_layers(n_params: int) -> int:
    """The number of layers that a transformer with ``n_params`` parameters probably has. The guess assumes 12 width^2
    parameters a layer, and a width of 128 times the number of layers."""
    return max(1, round((n_params / (12 * 128**2)) ** (1 / 3)))


def stack_of(n_params: int, n_layers: int, dtype: torch.dtype = torch.float32) -> ModelSizes:
    """A stack of equal layers. A layer has the four matrices of a transformer layer, with 3, 1, 4 and 4 twelfths of its
    parameters. The sizes sum to ``n_params`` exactly."""
    if n_params < 1 or n_layers < 1 or n_layers * 4 > n_params:
        raise ModelError(
            f"{n_params} parameters cannot be cut into {n_layers} layers",
            where="--params, --layers",
            fix="give at least 4 a layer",
        )
    names = (("attention.qkv", 3), ("attention.out", 1), ("mlp.up", 4), ("mlp.down", 4))
    params: list[ParamSize] = []
    given = done = 0
    for layer in range(n_layers):
        for name, parts in names:
            done += parts
            end = n_params * done // (12 * n_layers)
            params.append(ParamSize(f"layers.{layer}.{name}.weight", end - given, dtype))
            given = end
    return ModelSizes(tuple(params))


def sizes_of(
    model: torch.nn.Module,
    groups: Iterable[Iterable[torch.nn.Parameter]],
    comm_dtype_of: Callable[[str, torch.nn.Parameter], torch.dtype | None] = lambda name, param: None,
) -> ModelSizes:
    """The sizes of ``model``, which may be sharded or on the meta device. ``groups`` are its optimizer groups.

    Parameters that require a gradient but are in no group are the caller's responsibility. They count as frozen.
    ``comm_dtype_of`` gives the dtype in which a gradient is sent, if the configuration alone does not determine it.
    """
    group_of = {id(p): i for i, group in enumerate(groups) for p in group}

    def sizes(name: str, p: torch.nn.Parameter) -> Iterator[ParamSize]:
        if inner := byte_sizes(name, p):
            yield from (ParamSize(each, n_bytes, torch.uint8, None) for each, n_bytes in inner.items())
            return
        if is_codes(p):  # their dtype may be that of weights, which the plan would cast
            yield ParamSize(name, shape_of(p).numel() * p.element_size(), torch.uint8, None)
            return
        numel, dtype = shape_of(p).numel(), comm_dtype_of(name, p)
        n_tied = max(len(tied_over(p)), 1)
        yield ParamSize(name, numel, p.dtype, group_of.get(id(p)), dtype, cut_of(p), expert_ranks_of(p), n_tied)

    params = tuple(size for name, p in model.named_parameters() for size in sizes(name, p))
    is_sharded = any(state_of(p) is not None for p in model.parameters())
    leaves = frozenset(name for name, module in model.named_modules() if is_leaf(module))
    return ModelSizes(params, sum(b.nbytes for b in model.buffers()), is_sharded, leaves)


def model_of(
    sizes: ModelSizes, make_module: Callable[[], torch.nn.Module] = torch.nn.Module
) -> tuple[torch.nn.Module, list[list[torch.nn.Parameter]]]:
    """(a model of these sizes on the meta device, its optimizer groups), as input for the engine's layout. The model
    takes no memory."""
    root = make_module()
    n_groups = 1 + max((p.group for p in sizes.params if p.group is not None), default=-1)
    groups: list[list[torch.nn.Parameter]] = [[] for _ in range(n_groups)]
    for size in sizes.params:
        *path, last = size.name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, make_module())
            module = module._modules[part]
        shape = size.numel if size.cut is None else size.cut.logical_shape
        data = torch.empty(shape, dtype=size.dtype, device="meta")
        param = torch.nn.Parameter(data, requires_grad=size.group is not None)
        if size.cut is not None and size.n_expert_ranks > 1:
            param.data = size.cut.take(param.data)
            mark_stack(param, size.cut)
        elif size.cut is not None:
            keep_part(param, size.cut)
        elif size.n_expert_ranks > 1:
            param.allreduce, param.group_name = False, f"ep_size_{size.n_expert_ranks}"
        if size.n_tied > 1:
            mark_tied(param, range(size.n_tied))  # only their number matters
        module.register_parameter(last, param)
        if size.group is not None:
            groups[size.group].append(param)
    return root, groups


def group_sizes(base: torch.optim.Optimizer, *, is_sharded: bool, allow_untested: bool = False) -> OptimizerSizes:
    """The states of ``base`` per element, by group. A fused optimizer of this package declares its states; other
    optimizers are tried on a small tensor.

    Raises OptimizerError if the optimizer cannot be applied to shards (as ``initialize`` does), or cannot be tried.
    """
    sees_slices = not must_see_pieces(base, is_sharded=is_sharded, allow_untested=allow_untested)
    name = type(base).__name__
    if not declaration(base).updates_buckets:
        return OptimizerSizes(name, tuple(_try_out(base, g) for g in base.param_groups), False, sees_slices)
    state = StateSize(base.state_dtype, q8.BLOCK_ELEMS if base.is_quantized else 0)
    groups = range(len(base.param_groups))
    states = tuple((state,) * len(base.names_of_states(i)) for i in groups)
    matrices = frozenset(i for i in groups if base.scope_of_group(i) == "matrix")
    return OptimizerSizes(name, states, True, sees_slices, matrices, base.update_bytes)


def _try_out(base: torch.optim.Optimizer, group: dict) -> tuple[StateSize, ...]:
    """The states that one step of ``base`` makes for an fp32 parameter."""
    param = torch.nn.Parameter(torch.ones(PROBE_ELEMS, device="cpu"))
    param.grad = torch.ones(PROBE_ELEMS, device="cpu")
    trial = copy.copy(base)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [param]}]
    try:
        with torch.device("cpu"), torch.enable_grad():
            type(trial).step(trial)  # the class's method: a schedule may have wrapped the instance's
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise OptimizerError(
            f"{type(base).__name__} could not be tried on a tensor of {PROBE_ELEMS} elements: {error}",
            where="deepspeed_c plan",
            fix="name an optimizer in the configuration that keeps as much state",
        ) from error
    kept = [v for v in trial.state[param].values() if torch.is_tensor(v) and v.numel() == PROBE_ELEMS]
    return tuple(StateSize(None if v.dtype == torch.float32 else v.dtype) for v in kept)
