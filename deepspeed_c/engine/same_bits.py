"""The start of an engine with ``same_bits``: models and optimizers whose bits would depend on the number of ranks are
refused, torch's threads are set, and the arithmetic of all ranks is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.axes import AXIS_ROWS, Holds, Sees
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.compiler import Compile
from deepspeed_c.config.optim import OptimizerSection
from deepspeed_c.config.parallel import ExpertParallel
from deepspeed_c.config.precision import Bf16, Fp16
from deepspeed_c.engine.checkpoint.kept_bits import KeptBits
from deepspeed_c.engine.consistency import check_same_text
from deepspeed_c.engine.probe import check_probes, run_probe
from deepspeed_c.engine.torch_threads import TorchThreads
from deepspeed_c.errors import ConfigError, FeatureError, ModelError, OptimizerError, RankMismatchError
from deepspeed_c.inject.alike import raised_on_all
from deepspeed_c.moe.experts import SpreadLayer
from deepspeed_c.ops.optim import BY_TYPE, FusedOptimizer
from deepspeed_c.ops.scope import TORCH_ELEMENTWISE, declaration
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.zero.weights.param import state_of

__all__ = [
    "Arithmetic",
    "OptimizerCheck",
    "check_alignment",
    "hold_arithmetic",
    "refuse_what_depends_on_ranks",
]

_KEY = "same_bits.enabled"
_OR_OFF = f"or set {_KEY} to false"

# Bytes. Libraries choose their loops by the address of an operand within such a line.
_LINE_BYTES = 64

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def refuse_what_depends_on_ranks(
    model: nn.Module, mesh: Mesh, compiling: Compile, expert_parallel: ExpertParallel
) -> None:
    """Raises, on all ranks alike, if bits of the run would depend on the number of ranks: ConfigError for axes of the
    mesh and keys, ModelError for modules, FeatureError for deepcompile. Changes nothing. Collective.
    """
    with raised_on_all(mesh.comm, "same_bits"):
        _refuse_axes(mesh)
        if compiling.deepcompile:
            raise FeatureError(
                f"does not go with {_KEY}: compiled graphs reduce gradients by their own operators, not in the tree of"
                " grains",
                where="compile.deepcompile",
                fix=f"set it to false, {_OR_OFF}",
            )
        _refuse_modules(model)
        if expert_parallel.enabled and expert_parallel.autoep_size > 1:
            raise ConfigError(
                f"is {expert_parallel.autoep_size} with {_KEY}: ranks that hold experts together multiply the tokens of"
                " all of them in one product",
                where="expert_parallel.autoep_size",
                fix=f"set it to 1, {_OR_OFF}",
            )
        if get_accelerator().device_name() != "cpu" and not torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                "torch may use algorithms whose sums have another order in each run",
                where=_KEY,
                fix=f"call torch.use_deterministic_algorithms(True) before initialize, {_OR_OFF}",
            )


def _refuse_axes(mesh: Mesh) -> None:
    for axis in AXIS_ROWS:
        is_data = axis.sees is Sees.OTHER_SAMPLES and axis.holds is Holds.SAME
        if not is_data and mesh.size(axis.name) > 1:
            raise ConfigError(
                f"axis {axis.name!r} has {mesh.size(axis.name)} ranks: {axis.what} cuts products or their sums, so"
                " their bits depend on the number of these ranks",
                where=_KEY,
                fix=f"give all ranks to data parallelism, {_OR_OFF}",
            )


def _refuse_modules(model: nn.Module) -> None:
    if isinstance(model, PipelineModule):
        raise ModelError(
            "a PipelineModule adds the gradients of micro-batches in the order of its schedule",
            where=_KEY,
            fix=f"train the layers as a plain module, {_OR_OFF}",
        )
    for name, module in model.named_modules():
        reason = _reason_against(module)
        if reason:
            raise ModelError(
                f"module {name or '(the model)'} ({type(module).__name__}) {reason}",
                where=_KEY,
                fix=f"use a module without it (LayerNorm, GroupNorm, weight_norm, all experts on each rank), {_OR_OFF}",
            )


def _reason_against(module: nn.Module) -> str:
    if isinstance(module, nn.SyncBatchNorm):
        return "takes statistics over the ranks of a round, whose number differs"
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
        return "has running statistics, of the grains that one rank has seen"
    hooks = module._forward_pre_hooks.values()
    is_spectral = isinstance(module, nn.utils.parametrizations._SpectralNorm)
    if is_spectral or any(isinstance(hook, SpectralNorm) for hook in hooks):
        return "has vectors that each forward of a rank moves on (spectral norm)"
    if isinstance(module, SpreadLayer) and module.ep_size > 1:
        return f"has its experts on {module.ep_size} ranks, which multiply the tokens of all of them in one product"
    return ""


class OptimizerCheck:
    """Refuses optimizers whose updates depend on where a shard is cut. allows_untested: the key
    ``zero_allow_untested_optimizer``."""

    def __init__(self, model: nn.Module, fp16: Fp16, bf16: Bf16, *, allows_untested: bool) -> None:
        self._allows_untested = allows_untested
        if fp16.enabled or bf16.enabled:
            self._has_16bit_masters = bf16.enabled and bf16.bf16_master_weights_and_grads
        else:
            trained = (param for param in model.parameters() if param.requires_grad)
            self._has_16bit_masters = any(param.dtype in _SIXTEEN_BITS for param in trained)

    def check_given(self, optimizer: Any, section: OptimizerSection | None, comm: Collectives) -> None:
        """Raises OptimizerError, on all ranks alike, for the argument ``optimizer`` of ``initialize``, or the
        configuration's section. An optimizer that a function makes is left to ``check``. Collective."""
        with raised_on_all(comm, "optimizer"):
            if isinstance(optimizer, torch.optim.Optimizer):
                self.check(optimizer)
            elif optimizer is None and section is not None:
                self._check_section(section)

    def check(self, base: torch.optim.Optimizer) -> None:
        """Raises OptimizerError."""
        is_fused = any(group.get("fused") for group in base.param_groups)
        declared = declaration(base)
        self._check_class(type(base), declared.scope, is_fused=is_fused, is_quantized=declared.is_quantized)

    def _check_section(self, section: OptimizerSection) -> None:
        cls: Any = BY_TYPE.get(section.type.lower())
        if cls is None or section.params.get("torch_adam"):
            cls = getattr(torch.optim, {"adam": "Adam", "adamw": "AdamW"}.get(section.type.lower(), section.type), None)
        if cls is None:
            return  # build_optimizer names it
        scope = cls.scope if issubclass(cls, FusedOptimizer) else "element" if cls in TORCH_ELEMENTWISE else None
        self._check_class(cls, scope, is_fused=bool(section.params.get("fused")), is_quantized=False)

    def _check_class(self, cls: type, scope: str | None, *, is_fused: bool, is_quantized: bool) -> None:
        reason, fix = "", "use AdamW, Lion, SGD, Adagrad or Muon of the configuration's section optimizer"
        is_torchs = cls.__module__.startswith("torch.")
        if is_quantized:
            reason, fix = "its states of 8 bits have scales for blocks of a shard", 'use state_dtype "fp32" or "bf16"'
        elif scope is None and (is_torchs or not self._allows_untested):
            reason = "it is not known to be elementwise, so its bits may depend on where parameters are cut"
            fix += '; for a class of your own that is elementwise set "zero_allow_untested_optimizer": true'
        elif is_torchs and is_fused:
            reason = "torch's fused kernels round the last elements of a shard in another way than the others"
            fix = "leave fused=True out"
        elif is_torchs and self._has_16bit_masters:
            reason = (
                "on 16-bit masters torch's kernels round the last elements of a shard in another way than the others"
            )
            fix += ", or keep fp32 masters (section bf16 without bf16_master_weights_and_grads)"
        if reason:
            raise OptimizerError(
                f"{cls.__name__} does not go with {_KEY}: {reason}", where="optimizer", fix=f"{fix}, {_OR_OFF}"
            )


class Arithmetic(NamedTuple):
    """The arithmetic that all ranks of an engine with ``same_bits`` share, until ``close``."""

    kept: KeptBits
    threads: TorchThreads | None

    def close(self) -> None:
        """Restores the number of torch's threads."""
        if self.threads is not None:
            self.threads.close()


def hold_arithmetic(grain: int, n_threads: int | None, dtypes: Iterable[torch.dtype], comm: Collectives) -> Arithmetic:
    """Sets the number of torch's threads, and compares it and the results of a probe, in float32 and in ``dtypes``,
    between the ranks. None: leave the threads. Collective.

    Raises on all ranks alike, with the threads as before: RankMismatchError for other numbers or other bits, and
    ConfigError as TorchThreads does.
    """
    with ExitStack() as on_error:
        threads = None
        with raised_on_all(comm, "threads of torch"):
            if n_threads is not None:
                threads = on_error.enter_context(closing(TorchThreads(n_threads)))
        _check_threads(comm)
        probe = run_probe(
            torch.device(get_accelerator().current_device_name()), list(dict.fromkeys([torch.float32, *dtypes]))
        )
        check_probes(probe, comm)
        on_error.pop_all()
    return Arithmetic(KeptBits(grain, probe), threads)


def _check_threads(comm: Collectives) -> None:
    numbers = [int(n) for n in comm.gather_numbers(torch.get_num_threads(), label="threads of torch")]
    if len(set(numbers)) == 1:
        return
    usual = Counter(numbers).most_common(1)[0][0]
    odd = [f"rank {comm.global_ranks[rank]} has {n}" for rank, n in enumerate(numbers) if n != usual]
    raise RankMismatchError(
        f"the number of torch's threads differs, and bits of products may depend on it: {', '.join(odd)}, and rank"
        f" {comm.global_ranks[numbers.index(usual)]} has {usual}",
        where="same_bits.threads",
        fix="set same_bits.threads, or start all ranks with the same OMP_NUM_THREADS",
    )


def check_alignment(model: nn.Module, comm: Collectives) -> None:
    """Raises RankMismatchError on all ranks alike unless each whole weight and buffer begins at the same place within a
    line of 64 bytes on every rank: torch's products of few rows choose their loops by it. Collective.

    Weights in units begin at a multiple of 64 bytes. Others lie where the program has put them.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    check_same_text(
        f"the place of weights within {_LINE_BYTES} bytes",
        [
            f"{name} at byte {tensor.data_ptr() % _LINE_BYTES}"
            for name, tensor in named
            if state_of(tensor) is None and type(tensor.data) is torch.Tensor and tensor.is_cpu and tensor.numel() > 0
        ],
        comm,
        "build the model in the same way on every rank, and load its weights from copies of the same file",
    )
