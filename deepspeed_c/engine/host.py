"""The host of a user's model. It holds module, mesh, edits and sharded weights, and reads and writes weights. A host
does not train; engines extend it.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import Self

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.axes import DATA, TP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config import Config
from deepspeed_c.engine.attributes import ATTRIBUTES
from deepspeed_c.engine.compiling import Compiling
from deepspeed_c.engine.edits import EditContext, Edits
from deepspeed_c.engine.generate import Generation
from deepspeed_c.engine.getters import ABSENT_METHODS, ConfigGetters
from deepspeed_c.engine.parts import take_parts
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.weights import check_weights, consolidate, load_custom, load_weights
from deepspeed_c.env import read_env
from deepspeed_c.errors import FeatureError, MissingNameError, StateError
from deepspeed_c.moe.load import ExpertLoad, expert_load
from deepspeed_c.recompute.blocks import Blocks
from deepspeed_c.transfer.send import WeightSender
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.kinds import code_layers, names_beside
from deepspeed_c.zero.weights.param import state_of

__all__ = ["ModelHost", "take_from_others"]

# The open hosts. A new host may take the model of one of them.
_open_hosts: weakref.WeakSet[ModelHost] = weakref.WeakSet()


def take_from_others(model: torch.nn.Module) -> None:
    """Detaches other hosts from a model that is about to get a new host. It detaches hosts that hold sharded parameters
    of the model, and hosts whose claimed parameters all belong to the model.

    A detached host that trains nothing can still be used: its forward runs the module with the new host's hooks.
    """
    params = set(model.parameters())
    fetchers = {id(state.fetcher) for p in params if isinstance(state := state_of(p), PlacedShard)}
    for host in list(_open_hosts):
        claimed = host._claimed_params()
        if id(host._fetcher) in fetchers or (claimed and params.issuperset(claimed)):
            host._hand_over()


class ModelHost(Compiling, ConfigGetters, torch.nn.Module, metaclass=ABCMeta):
    """A model on its ranks, ready to run. ``module`` is the model; its parameters stay the same objects.

    Attributes of the module can be read from the host too. The constructor of a subclass must end with a call of
    ``_open``.
    """

    _attributes = ATTRIBUTES

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        mesh: Mesh,
        precision: Precision,
        device: torch.device,
        edits: Edits,
    ) -> None:
        super().__init__()
        self.module = model
        comm = mesh.comm
        self._config, self._mesh, self._comm, self._precision, self.device = config, mesh, comm, precision, device
        self.config = config.as_dict()
        self.global_rank, self.world_size = comm.global_rank, comm.world_size
        self.dp_world_size, self.mp_world_size = mesh.size(*DATA), mesh.size(TP)
        self.local_rank = read_env().local_rank
        self._layout = Layout([], [], None)
        self._is_closed = False
        self._generation = Generation(
            model,
            fetcher=lambda: self._fetcher,
            require_ready=self._require_generation,
            check_prompts=self._check_prompts,
            trains=lambda: self._trains,
            group=lambda: self._edits.get("group generation"),
            comm=comm,
        )
        self._edits = edits
        self._sender = WeightSender(comm)

    def _open(self, layout: Layout) -> None:
        """Takes over the units that hold the module's parameters, and makes the edits that need the units. If it
        raises, the module is detached from the host again."""
        self._layout = layout
        try:
            self._adopt(layout)
        except BaseException:
            self._edits.close()
            self._release()
            raise

    def _adopt(self, layout: Layout) -> None:
        """Connects the units of a layout, and the hooks that gather their weights, to this host."""
        self._layout = layout
        self._edits.make(
            EditContext(
                self._config,
                self._mesh,
                layout,
                stages=self._stage_names(),
                name_of_pass=self._name_of_pass,
                generation=self._generation,
            )
        )
        self._blocks: Blocks = self._edits["recomputation"]
        _open_hosts.add(self)

    def _claimed_params(self) -> list[torch.nn.Parameter]:
        """The parameters that no other host may hold beside this one: another host that gets all of them takes the
        model over."""
        return []

    def _stage_names(self) -> list[str]:
        """Names of the stages that a forward of this rank may run: the whole model."""
        return [""]

    def _hand_over(self) -> None:
        """Called when the model gets another host. This host can still run the module."""
        self._uncompile()
        self._undo_edits()
        self._release()

    def _undo_edits(self) -> None:
        """Makes the module what it was before this host, but for its cut."""
        self._edits.close()

    def _release(self) -> None:
        """Removes hooks and buffers. Parameters keep their values; sharded parameters stay sharded without an engine."""
        self._edits.undo("gathering")
        if self._fetcher is not None:
            self._fetcher.close()
        for unit in (*self._layout.trained, *self._layout.frozen):
            unit.release()
        self._layout = Layout([], [], None)

    def describe(self) -> str:
        """The resolved configuration, and how this rank's states are laid out (``dump_state`` logs it)."""
        lines = [self._config.table(), f"mesh: {self._mesh}"]
        for i, unit in enumerate((*self._layout.trained, *self._layout.frozen)):
            what = "frozen" if unit in self._layout.frozen else f"group {unit.group}"
            lines.append(f"unit {i}: {what}, {unit.describe()}")
        return "\n".join(lines)

    @property
    def _fetcher(self) -> Fetcher | None:
        return self._layout.fetcher

    @property
    def _shards_parameters(self) -> bool:
        return self._fetcher is not None and bool(self._fetcher.groups)

    @property
    def _trains(self) -> bool:
        """Whether there is an optimizer."""
        return False

    def _require_generation(self) -> None:
        self._require_open()
        self._require_states("generate")

    def _check_prompts(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises if the model cannot go on from the prompts of a ``generate`` with these arguments."""

    def _name_of_pass(self) -> str:
        return "train" if torch.is_grad_enabled() else "eval"

    def train(self, mode: bool = True) -> Self:
        """As of any module. ``train()`` ends the lease of a generation: see ``generate``.

        Raises StateError while another thread generates, and on a rank that has written to sharded weights since the
        generation began (they are as before then, and ``train()`` may be called again).
        """
        if mode:
            self._generation.end("train")
        return super().train(mode)

    def module_state_dict(
        self, destination=None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any]:
        """The module's state dict: whole tensors in the dtype of training.

        If parameters are sharded, or cut over tensor-parallel ranks, it is collective and puts the whole model into the
        host memory of every rank. ``save_16bit_model`` and ``_zero3_consolidated_16bit_state_dict`` need less memory.
        """
        if self._shards_parameters or self.mp_world_size > 1:
            state = consolidate(
                self.module, self._fetcher, self._mesh, exclude_frozen=exclude_frozen_parameters, on_all_ranks=True
            )
            named = {prefix + name: value for name, value in state.items()}
            if destination is not None:
                destination.update(named)
            return named if destination is None else destination
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
            own = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
            for name in frozen | names_beside(self.module, own):
                state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Loads weights into the module, on every rank alike.

        If the module is trained, the fp32 masters are overwritten with the loaded weights, and an accumulation window
        begins.

        checkpoint: a state dict, or a dict that holds a state dict under "module". fetch_z3_params, z3_params_to_fetch:
        accepted and ignored; sharded parameters are always loaded. Raises FeatureError for allowed_missing_keys, which
        belong to expert parallelism.
        """
        self._require_open()
        if allowed_missing_keys is not None:
            raise FeatureError(
                "missing keys cannot be allowed one by one",
                where="load_module_state_dict(allowed_missing_keys=...)",
                fix="pass strict=False",
            )
        weights = checkpoint["module"] if isinstance(checkpoint.get("module"), Mapping) else checkpoint
        weights = take_parts(self.module, weights, strict=strict)
        # The library's own load knows no state beside codes.
        loads_pieces = self._shards_parameters or any(True for _ in code_layers(self.module))
        if custom_load_fn is None and loads_pieces:
            check_weights(self.module, weights, strict)
        self._begin_load()
        if custom_load_fn is not None:
            load_custom(self.module, custom_load_fn, weights)
        elif loads_pieces:
            if self._fetcher is not None:
                self._fetcher.begin_writes()
            load_weights(self.module, weights)
        else:
            self.module.load_state_dict(weights, strict=strict)
        self._take_weights()

    def _begin_load(self) -> None:
        """Called before other weights are written to the module."""

    def _take_weights(self) -> None:
        """Called after other weights have been written to the module."""
        if self._fetcher is not None:
            self._fetcher.weights_changed()

    def expert_load(self) -> dict[str, ExpertLoad]:
        """How many tokens chose each expert in the last forward, over all ranks, and how many of them were dropped: by
        the name of the layer (a ``MOELayer``). Empty for a model without such layers. Collective."""
        self._require_open()
        return expert_load(self.module, self._mesh.tokens)

    def empty_partition_cache(self) -> None:
        """Releases gathered weights that are kept for their next use, and returns the memory to the system. Do not call
        it during a forward or backward pass."""
        self._require_open()
        if self._fetcher is not None:
            self._generation.end("empty_partition_cache")
            if self._fetcher.phase.is_active:
                raise StateError(
                    "called within a forward or backward pass",
                    where="empty_partition_cache",
                    fix="call it between two of them",
                )
            self._fetcher.driver.abort()
            self._fetcher.means.pool.clear()
        get_accelerator().empty_cache()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            if name in self._attributes:
                return self._attributes[name](self)
            try:
                return getattr(module, name)
            except AttributeError:
                pass
        if name in ABSENT_METHODS:
            raise MissingNameError(
                "is not part of this version",
                where=f"DeepSpeedEngine.{name}",
                fix=f"use instead: {ABSENT_METHODS[name]}",
            )
        raise AttributeError(f"neither the engine nor its module ({type(module).__name__}) has {name!r}")

    def _require_states(self, what: str) -> None:
        """Raises StateError if weights or states are offloaded or half loaded. ``what``: a verb for the message."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError(
                "the engine is closed",
                where="DeepSpeedEngine",
                fix="make a new one with deepspeed_c.initialize (transformers and accelerate: a new Trainer, a new prepare)",
            )

    def close(self) -> None:
        """Removes hooks and frees buffers and optimizer state. May be called twice.

        The module keeps its weights and works without the engine. Sharded parameters of stage 3 stay sharded, as under
        ``zero.Init``, because a rank may not have memory for all of them. They can be used with
        ``zero.GatheredParameters`` and with another ``initialize``.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._end()

    def destroy(self) -> None:
        """As ``close``."""
        self.close()

    def collect_python_gc(self) -> int:
        """Run Python's cycle collector at a moment of your choice and return the number of objects that it freed."""
        return gc.collect()

    def _end(self) -> None:
        self._uncompile()
        self._undo_edits()
        self._generation.drop_cache()
        self._release()
        self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
