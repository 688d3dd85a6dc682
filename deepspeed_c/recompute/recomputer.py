"""Runs layers so that their activations are recomputed, according to one section of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import msgspec
import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.config.offload import Aio
from deepspeed_c.config.parallel import LocalTransport
from deepspeed_c.errors import ConfigError
from deepspeed_c.offload.swap import SwapSettings
from deepspeed_c.quantity import parse_bytes
from deepspeed_c.recompute.active import entered
from deepspeed_c.recompute.budget import KEEP, MEASURE, N_ON_THE_WAY, RECOMPUTE, Budget, Tier, Treatment
from deepspeed_c.recompute.compare import Outputs, OutputsOnce, Trace
from deepspeed_c.recompute.conditions import Conditions
from deepspeed_c.recompute.counters import Counters, LayerCalls
from deepspeed_c.recompute.frames import Frame, Inputs, Observers
from deepspeed_c.recompute.nests import Arguments, tensors_of
from deepspeed_c.recompute.operators import KeptOutputs, Measurement
from deepspeed_c.recompute.packers import Arena, ShardPacker, StashPacker
from deepspeed_c.recompute.reentrant import ReentrantCall
from deepspeed_c.recompute.stash import MAX_AHEAD, Stash, StashFile
from deepspeed_c.saved_tensors import Packer, SavedTensors, counts_all, hooks_around

_NO_NAMES: Mapping[int, str] = {}
# Largest number of bytes that a budget's first step moves to measure the speed.
_MOST_PROBED = 64 << 20

__all__ = ["Recomputer", "check_section", "label_of", "parked", "tensor_parallel_ranks"]


def _module_of(function: Callable) -> torch.nn.Module | None:
    """The module that belongs to ``function``: ``function`` itself, the object of the method, or the first argument of
    a partial (layers of transformers pass themselves).
    """
    if isinstance(function, torch.nn.Module):
        return function  # saves the search for missing attributes, which is slow on a module
    while isinstance(function, functools.partial):
        if function.args and isinstance(function.args[0], torch.nn.Module):
            return function.args[0]
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


def label_of(function: Callable, names: Mapping[int, str] = _NO_NAMES) -> str:
    """The name of a layer in errors. names: names of modules, by id."""
    module = _module_of(function)
    if module is not None:
        return names.get(id(module)) or type(module).__name__
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)


class _Keeping:
    """The packers that keep inputs in another form, for reentrant and other calls."""

    def __init__(self, packers: Sequence[Packer]) -> None:
        self.packers = tuple(packers)
        self.saved = SavedTensors()
        for packer in self.packers:
            self.saved.add(packer)


class Recomputer:
    """Recomputes layers with the settings of one engine, or of one ``configure``: options, tensor-parallel ranks,
    memory.

    comm: the ranks that activations are cut over; None: this rank alone.
    aio: settings of reading and writing files.
    names: names of modules, by id, for errors and figures.
    budget: decides which layers are kept instead of recomputed; None: no layers are.

    Raises ConfigError where inputs have to wait in a file that cannot be made.
    """

    def __init__(
        self,
        section: ActivationCheckpointing,
        comm: Collectives | None = None,
        aio: Aio | None = None,
        names: Mapping[int, str] = _NO_NAMES,
        budget: Budget | None = None,
    ) -> None:
        self.section, self._comm, self._names, self.budget = section, comm, names, budget
        self._calls, self._once = LayerCalls(), OutputsOnce()
        self.counters = Counters() if section.profile else None
        self.arena = Arena() if section.contiguous_memory_optimization else None
        self.stash = self._make_stash(Aio() if aio is None else aio)
        self._keeping = self._make_keeping(self.stash)
        # With a budget, inputs stay in the computing device's memory unless the budget sends them away.
        self._near = self._keeping if budget is None or self.stash is None else self._make_keeping(None)
        if budget is not None and self.stash is not None:
            budget.set_probe(self._probe)

    def _make_keeping(self, stash: Stash | None) -> _Keeping:
        section, comm = self.section, self._comm
        packers: list[Packer] = []
        is_cut = section.partition_activations and comm is not None and comm.world_size > 1
        if is_cut or self.arena is not None:
            packers.append(ShardPacker(comm if is_cut else None, self._calls, arena=self.arena, stash=stash))
        elif stash is not None:
            packers.append(StashPacker(stash))
        return _Keeping(packers)

    def _probe(self, n_bytes: int) -> Tier | None:
        """The speed of moving ``n_bytes`` of inputs to the place where inputs wait; None if inputs wait where they are."""
        device = torch.device(get_accelerator().current_device_name())
        if not self.stash.takes(device):
            return None
        way_ns, thread_ns = self.stash.probe(min(n_bytes, _MOST_PROBED), device)
        n_bytes = min(n_bytes, _MOST_PROBED)
        return Tier(1e9 * n_bytes / max(way_ns, 1), 1e9 * n_bytes / max(thread_ns, 1))

    def _make_stash(self, aio: Aio) -> Stash | None:
        offload = self.section.offload
        most_ahead = MAX_AHEAD if self.budget is None else N_ON_THE_WAY - 1
        if offload.device == "nvme":
            file = StashFile(offload.nvme_path or "", SwapSettings.of(aio), most_ahead)
            # A budget plans the computing device's memory. If that is the host's, inputs go to the file at once.
            stays = self.budget is None or get_accelerator().device_name() != "cpu"
            max_in_cpu = bytes_of(offload.max_in_cpu) if stays else 0
            return Stash(self._calls, file, max_in_cpu, self.counters, most_ahead=most_ahead)
        if offload.device == "cpu" or self.section.cpu_checkpointing:
            return Stash(self._calls, None, counters=self.counters, most_ahead=most_ahead)
        return None

    def run(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        label: str = "",
        is_reentrant: bool | None = None,
    ) -> Any:
        """Runs ``function(*args, **kwargs)`` and keeps only its inputs for the backward."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            # A compiler knows torch's own checkpoint, and makes the recomputation a part of its graph.
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():
            # Within torch.func no recomputation is possible: its transforms save nothing through hooks, so nothing can
            # be left out.
            return function(*args, **kwargs)
        section = self.section
        label = label or label_of(function, self._names)
        self._calls.begin(label)
        if self.counters is not None:
            kept = sum(each.nbytes for each in tensors_of(args, kwargs) if not is_parameter(each))
            self.counters.of(label).keep(kept)
            function = self.counters.timed(label, function)
        budget = self.budget
        treatment = None if budget is None else budget.treatment(label, tensors_of(args, kwargs))
        if section.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()
        if treatment is None:
            outputs = self._run_again(function, args, kwargs, label, is_reentrant)
        elif treatment.choice == KEEP:
            if self.stash is not None:
                self.stash.pass_by()
            with budget.within:
                outputs = function(*args, **kwargs)
        else:
            with budget.within:
                outputs = self._run_planned(treatment, function, args, kwargs, label, is_reentrant)
        if section.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()
        return outputs

    def _run_again(
        self, function: Callable, args: tuple, kwargs: dict[str, Any], label: str, is_reentrant: bool | None
    ) -> Any:
        """Runs a layer that has no plan."""
        arguments = Arguments(args, kwargs)
        if self.section.use_reentrant if is_reentrant is None else is_reentrant:
            return self._run_reentrant(function, arguments, label, self._around)
        return self._run_hooked(function, args, kwargs, arguments, label, self._around)

    @property
    def _around(self) -> _Keeping:
        """The packers for a layer without a plan. If it runs within a planned layer, its inputs stay in the memory in
        which that layer's plan has counted them.
        """
        return self._near if self.budget is not None and self.budget.is_within else self._keeping

    def _run_planned(
        self,
        treatment: Treatment,
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        label: str,
        is_reentrant: bool | None,
    ) -> Any:
        """Runs a layer that its plan does not keep."""
        is_near = treatment.choice == RECOMPUTE
        if is_near and self.stash is not None:
            self.stash.pass_by()
        arguments = Arguments(args, kwargs)
        keeping = self._near if is_near else self._keeping
        is_reentrant = self.section.use_reentrant if is_reentrant is None else is_reentrant
        if treatment.choice == MEASURE:
            measurement = Measurement(
                label,
                _module_of(function),
                arguments.tensors,
                self.budget.counted,
                # A reentrant call runs the layer to its end, and so does a comparison of values.
                ends_early=not (is_reentrant or self.section.check),
            )
            hooked = self._hooks(function, arguments, label, keeping, Observers(on_save=measurement.note_saved))
            with hooked, measurement:
                outputs = function(*args, **kwargs)
            self.budget.note(measurement.done())
            return outputs
        if is_reentrant:
            return self._run_reentrant(function, arguments, label, keeping)
        if not treatment.operators:
            return self._run_hooked(function, args, kwargs, arguments, label, keeping)
        kept = KeptOutputs(label, treatment.operators)
        with self._hooks(function, arguments, label, keeping, Observers(outputs=kept)), kept.recording():
            return function(*args, **kwargs)

    def _hooks(
        self,
        function: Callable,
        arguments: Arguments,
        label: str,
        keeping: _Keeping,
        watch: Observers,
    ) -> AbstractContextManager[Any]:
        """The context of a forward that will be run again."""
        inputs = Inputs(arguments.tensors, keeping.packers, label)
        arguments.forget()
        conditions = Conditions(with_python=self.section.python_random)
        return Frame(function, arguments, inputs, conditions, label, watch).hooks()

    def _run_hooked(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        arguments: Arguments,
        label: str,
        keeping: _Keeping,
    ) -> Any:
        trace, looked_at = self._trace(function, label), self._look(function, label)
        with (
            self._hooks(function, arguments, label, keeping, Observers(trace, looked_at=looked_at)),
            nullcontext() if trace is None else trace.recording(),
        ):
            outputs = function(*args, **kwargs)
        if looked_at is not None:
            looked_at.note(outputs)
        return outputs

    def _run_reentrant(self, function: Callable, arguments: Arguments, label: str, keeping: _Keeping) -> Any:
        tensors = arguments.tensors
        arguments.forget()
        conditions = Conditions(with_python=self.section.python_random)
        call = ReentrantCall(
            function, arguments, conditions, label, self._trace(function, label), self._look(function, label)
        )
        module = _module_of(function)
        is_trained = module is None or any(param.requires_grad for param in module.parameters())
        if not keeping.packers or counts_all(hooks_around()[0]):
            return call.run(tensors, is_trained=is_trained)
        with keeping.saved.hooks_of(None, lambda _: None):
            return call.run(tensors, is_trained=is_trained)

    def _trace(self, function: Callable, label: str) -> Trace | None:
        return Trace(label, _module_of(function)) if self.section.check else None

    def _look(self, function: Callable, label: str) -> Outputs | None:
        """The comparison of the layer's outputs: in each call with ``"check": true``, otherwise once."""
        if self.section.check:
            return Outputs(label, is_exact=True)
        return self._once.of((label, id(_module_of(function))), label)

    def active(self, inputs: Any = (), name: str = "") -> AbstractContextManager[None]:
        """Calls of ``checkpoint`` within follow this object. They all belong to one forward. inputs: the model's
        arguments. name: name of the pipeline stage, if there is one.
        """
        if self.budget is None or not torch.is_grad_enabled():
            return entered(self)
        stack = ExitStack()
        stack.enter_context(entered(self))
        tensors = [leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf)]
        stack.enter_context(self.budget.forward(tensors, name))
        return stack

    def clear(self) -> None:
        """Frees the memory that is kept for the next step."""
        if self.arena is not None:
            self.arena.clear()
        if self.stash is not None:
            self.stash.clear()

    def close(self) -> None:
        """Ends the use by an engine, or by a ``configure``. Backwards of graphs that still exist work afterwards."""
        self.clear()
        if self.stash is not None:
            self.stash.close()


def tensor_parallel_ranks(mpu: Any, local: LocalTransport = "auto") -> Collectives | None:
    """The ranks that activations are cut over. None without an ``mpu``, and for an ``mpu`` without such a group.

    local: the key ``comm.local``: whether ranks of one host exchange activations through shared memory.

    Collective over the group. Raises CommError where ``local`` is "shm" and the ranks cannot share memory.
    """
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        group = getattr(mpu, name, lambda: None)()
        if group is not None:
            ranks = Collectives(group)
            ranks.use_shared_memory(local)
            return ranks
    return None


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def parked(section: ActivationCheckpointing, *, wanted: bool) -> ActivationCheckpointing:
    """``section``, with inputs that wait in host memory if that is ``wanted`` and the section names no other place."""
    if not wanted or section.offload.device != "none":
        return section
    return msgspec.structs.replace(section, offload=msgspec.structs.replace(section.offload, device="cpu"))


def bytes_of(max_in_cpu: int | str | None) -> int:
    """``max_in_cpu`` as a number of bytes. Raises ConfigError for other values."""
    where = "activation_checkpointing.offload.max_in_cpu"
    found = parse_bytes(max_in_cpu, where) if isinstance(max_in_cpu, str) else max_in_cpu or 0
    if found < 0:
        raise ConfigError(f"{found} is negative", where=where, fix='write a number of bytes such as 8000000 or "8GiB"')
    return found


def check_section(section: ActivationCheckpointing, n_layers: int | None, where: str) -> None:
    """Raises ConfigError for options whose conditions are not met. n_layers: number of layers, if the caller knows it."""
    bytes_of(section.offload.max_in_cpu)
    if not section.contiguous_memory_optimization:
        return
    if section.offload.device == "nvme":
        raise ConfigError(
            '"contiguous_memory_optimization" keeps in one piece of memory what "offload" keeps in a file',
            where=where,
            fix='set one of them to false, or "device" to "none"',
        )
    missing = []
    if not section.partition_activations:
        missing.append('"partition_activations": true')
    if section.number_checkpoints is None and n_layers is None and section.layers is None:
        missing.append('"number_checkpoints" (or "layers", or set_num_layers)')
    if missing:
        raise ConfigError(
            f'"contiguous_memory_optimization" needs {" and ".join(missing)}',
            where=where,
            fix="add them, or set it to false",
        )
