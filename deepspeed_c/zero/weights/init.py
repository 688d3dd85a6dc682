"""``zero.Init``: shards a model's parameters while its modules are constructed, so that no rank ever holds the whole
model.

The file has DeepSpeed's name because Hugging Face code replaces and looks up names in it:
``zero_wrapper_for_fp_tensor_constructor``, ``_orig_torch_arange``, ``get_accelerator``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any, get_args

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _device
from typing_extensions import Self

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm import get_world_group, init_distributed, is_initialized
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import LocalTransport
from deepspeed_c.config.source import source_among
from deepspeed_c.errors import ConfigError, FeatureError, ModelError, StateError
from deepspeed_c.logging import logger
from deepspeed_c.zero.weights.code_layers import take_over_layers
from deepspeed_c.zero.weights.fp32_buffers import keep_buffers_in_fp32
from deepspeed_c.zero.weights.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed_c.zero.weights.kinds import beside_codes, is_codes
from deepspeed_c.zero.weights.param import (
    StandaloneShard,
    ZeroParamStatus,
    ZeroParamType,
    check_edit,
    is_data_held,
    make_sharded,
    point_at,
    point_at_nothing,
    state_of,
)

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "materialize",
    "open_context",
    "register_external_parameter",
    "restore_init_context",
    "shard_anew",
    "shutdown_init_context",
    "store_whole",
    "suspended",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn
_orig_torch_rand = torch.rand
_orig_torch_tensor = torch.tensor

_CONSTRUCTORS: dict[str, Callable] = {
    "empty": _orig_torch_empty,
    "zeros": _orig_torch_zeros,
    "ones": _orig_torch_ones,
    "full": _orig_torch_full,
    "arange": _orig_torch_arange,
    "eye": _orig_torch_eye,
    "randn": _orig_torch_randn,
    "rand": _orig_torch_rand,
    "tensor": _orig_torch_tensor,
}


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable, target_fp_dtype: torch.dtype | None, target_device: str | torch.device | None = None
) -> Callable:
    """A constructor like ``fn``. Its floating-point results have the dtype ``target_fp_dtype`` and are on
    ``target_device`` unless the caller names a device.

    The constructor decides a dtype or a device that is None.
    """

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None and not _is_placed_by_context():
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return construct


def _is_placed_by_context() -> bool:
    """Whether a ``with torch.device(...)`` context is open. Such a context decides where tensors are made (often the
    meta device)."""
    # torch.get_default_device() cannot be used here: it calls torch.tensor, which is replaced.
    return _orig_torch_empty(0).device.type != "cpu"


# The open contexts, innermost last. There is one stack per process, because contexts replace names of the whole
# process.
_open: list[Init] = []
_suspended: list[list[Init]] = []


class DeepSpeedTensorOverride(enum.Enum):
    """The properties of new tensors that ``Init`` decides."""

    dtype = 1
    device = 2


class Init:
    """Context that shards every module's parameters as soon as the module is constructed, and parameters on the meta
    device as soon as others with values take their place.

    Each rank constructs the module. Rank 0's values are sent to all ranks, and each rank keeps an even share of the
    elements (no padding). Contexts may be nested. ``torch.distributed`` is started if it has not been.

    Args:
        module: an existing module to shard in place at once. Parameters on the meta device are initialised first,
        module by module. data_parallel_group, zero_param_parallel_group: the ranks to shard over; default: the ranks of
        ``mpu.get_data_parallel_group()``, or all ranks without an mpu. The layers of a ``PipelineModule`` are sharded
        over the ranks that hold them. mem_efficient_linear: accepted and ignored;
        linear layers need no replacement, because autograd keeps no gathered weight. remote_device: "none", "cpu" or
        "nvme"; None: as the configuration's offload_param says. Shards lie in host memory for "cpu" and "nvme"; the
        engine moves them to files for "nvme".
        pin_memory: accepted for shards in host memory.
        config_dict_or_path, config: the configuration. Its bf16 or fp16 section gives the dtype; ``"auto"`` values are
        allowed. Buffers that data_types.keep_in_fp32_modules names stay in fp32. enabled: False makes the context do
        nothing.
        dtype: dtype of new floating-point parameters and buffers; overrides the configuration's.
        mpu: an object with ``get_data_parallel_group()``.
        zero_quantized_weights, zero_quantized_nontrainable_weights: not supported yet.
        sequence_data_parallel_group: the ranks that share data and sequence, in place of the data-parallel group.
        param_swapper: refused; the configuration says where weights live.
        tensor_overrides: which properties of new tensors the context decides in ``torch.empty`` and similar functions:
        dtype and device (the default), one of them, or neither. param_dict: the configuration as a dict (an older name
        of ``config``).

    Raises:
        CommError: a process group could not be started. FeatureError: an argument is not supported yet. ModelError: a
        parameter on the meta device belongs to a module that cannot initialise it.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Collection[DeepSpeedTensorOverride] = tuple(DeepSpeedTensorOverride),
        *,
        param_dict: Any = None,
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise FeatureError(
                "gathering quantized weights is not part of this version",
                where="zero.Init(zero_quantized_weights=...)",
                fix="leave it out",
            )
        if param_swapper is not None:
            raise FeatureError(
                "the engine itself makes the files of offloaded weights",
                where="zero.Init(param_swapper=...)",
                fix='leave it out, and set "zero_optimization.offload_param" in the configuration',
            )
        if remote_device not in (None, "none", "cpu", "nvme"):
            raise ConfigError(
                f"{remote_device!r} is not a place for shards",
                where="zero.Init(remote_device=...)",
                fix='use "none", "cpu" or "nvme"',
            )
        if not is_initialized():
            init_distributed()
        group = sequence_data_parallel_group or zero_param_parallel_group or data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        sources = {"config_dict_or_path": config_dict_or_path, "config": config, "param_dict": param_dict}
        source = source_among({name: each or None for name, each in sources.items()}, "zero.Init")
        keys = {} if source is None else source.keys
        self.local = _local_of(keys)
        """The transport between ranks of one host."""
        self.is_group_given = group is not None
        holders = None if group is not None else getattr(module, "ranks_of_layers", None)
        if holders is None:
            self.comm = Collectives(group=group)
            self.comm.use_shared_memory(self.local)
        else:
            self.comm = holders(self.local)
        if self.comm.world_size == 1:
            logger.warning(
                "zero.Init shards over one rank, which saves nothing; start several with the launcher,"
                " or call deepspeed_c.init_distributed() before"
            )
        self.device = torch.device(get_accelerator().current_device_name())
        is_remote = (remote_device or _place_of(keys)) in ("cpu", "nvme")
        self._home = torch.device("cpu") if is_remote else None
        self.dtype = dtype or _dtype_of(keys)
        self._keep_in_fp32 = _kept_of(keys)
        self.tensor_overrides = tuple(tensor_overrides)
        # Parameters that constructors have accessed after sharding. They stay whole while other references to their
        # data exist.
        self._edited: list[torch.nn.Parameter] = []
        if module is not None:
            materialize(module, self.device, self._shard_module)
            take_over_layers(module, self.device)  # a layer of codes holds a second reference to them
            for name, tensor in beside_codes(module).items():
                self.comm.broadcast(tensor.data, 0, label=name)
            for name, each in module.named_modules():
                self._shard_module(each, name)
            keep_buffers_in_fp32(module, self._keep_in_fp32, self.dtype)

    def get_dp_process_group(self) -> Any:
        """The process group that parameters are sharded over."""
        return self.comm.group or get_world_group()

    def get_partition_dp_group(self, param: torch.nn.Parameter) -> Any:
        """The process group that the sharded parameter ``param`` is sharded over."""
        return state_of(param).comm.group or get_world_group()

    def get_partition_rank(self) -> int:
        """This process's rank in ``get_dp_process_group()``."""
        return self.comm.rank

    @property
    def num_partitions(self) -> int:
        return self.comm.world_size

    def __enter__(self) -> Self:
        if self.enabled:
            if not _open:
                _patch_modules()
            _open.append(self)
            _patch_constructors(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self.enabled:
            if not _open or _open[-1] is not self:
                raise StateError(
                    "contexts were not left in the reverse order of their entry", where="zero.Init", fix="nest them"
                )
            try:
                self.shard_edited(keep=kind is None)
            finally:
                _open.pop()
                if _open:
                    _patch_constructors(_open[-1])
                else:
                    _unpatch_constructors()
                    _unpatch_modules()
        return False

    @property
    def is_open(self) -> bool:
        return self in _open

    @contextlib.contextmanager
    def over(self, ranks: Collectives) -> Iterator[None]:
        """Within this context parameters are sharded over ``ranks``, which construct other modules than the rest.

        A group that the caller of ``Init`` has given stays in use. It has to lie within ``ranks``.
        """
        kept = self.comm, self._edited
        # All ranks share the parameters that were edited before, and these ranks alone construct modules now.
        self._edited = []
        if not self.is_group_given:
            self.comm = ranks
        try:
            yield
        finally:
            self.comm = kept[0]
            self._edited = [*kept[1], *self._edited]

    def open_for_edit(self, param: torch.nn.Parameter) -> None:
        """Makes a parameter of this context whole for an edit. When it is sharded again, rank 0's values count.
        Collective, which is allowed here because all ranks construct the same modules."""
        self._shard_unused()
        state_of(param).acquire([param])
        self._edited.append(param)

    def _shard_unused(self) -> None:
        """Shards edited parameters again if no rank holds a reference to their data. While there is such a reference,
        an edit through it would be lost, so the parameter stays whole."""
        if not self._edited:
            return
        edited, self._edited = self._edited, []
        by_ranks: dict[Collectives, list[torch.nn.Parameter]] = {}
        for param in edited:
            by_ranks.setdefault(state_of(param).comm, []).append(param)
        for ranks, params in by_ranks.items():
            held = ranks.sum_numbers([float(is_data_held(param)) for param in params], label="edited parameters")
            for param, n_holders in zip(params, held):
                if n_holders:
                    self._edited.append(param)
                else:
                    self._shard_again(param)

    def shard_edited(self, keep: bool) -> None:
        """Shards all edited parameters again. Without ``keep`` edits are dropped and nothing is sent, because an
        exception was raised, perhaps on one rank only."""
        while self._edited:
            param = self._edited.pop(0)
            if keep:
                self._shard_again(param)
            else:
                state_of(param).give_back([param])

    def _shard_again(self, param: torch.nn.Parameter) -> None:
        state = state_of(param)
        with torch.no_grad():
            whole = param.data.to(device=self.device, dtype=state.dtype).contiguous()
            check_edit(state, whole)
            state.comm.broadcast(whole, 0, label=state.name)
            param.data = whole
        state.store(param)
        state.give_back([param])

    def _shard_module(self, module: torch.nn.Module, name: str = "") -> None:
        """Shards the module's own parameters, without its submodules' parameters."""
        for key, param in module._parameters.items():
            is_part = getattr(param, "expert_cut", None) is not None  # other ranks hold other experts
            if param is not None and state_of(param) is None and not param.is_meta and not is_part:
                self.shard_param(param, f"{name}.{key}" if name else f"{type(module).__name__}.{key}")

    def shard_param(self, param: torch.nn.Parameter, name: str) -> None:
        """Shards one parameter with the values of rank 0 of the ranks. Collective."""
        with torch.no_grad():
            data = param.data
            if data.device != self.device:
                data = data.to(self.device)
            if self.dtype is not None and data.is_floating_point() and not is_codes(param):
                data = data.to(self.dtype)
            data = data.contiguous()
            self.comm.broadcast(data, 0, label=name)
            param.data = data
        state = StandaloneShard(param, name, self.comm, home=self._home, builder=self)
        make_sharded(param, state)
        point_at_nothing(param)


def open_context() -> Init | None:
    """The innermost open ``Init``; None if none is open."""
    return _open[-1] if _open else None


def shard_anew(param: torch.nn.Parameter, ranks: Collectives, *, is_kept: bool) -> None:
    """Shards ``param``, which an ``Init`` has sharded over other ranks, over ``ranks`` if ``is_kept``. Collective over
    the other ranks.

    Raises StateError if the parameter is whole at the moment.
    """
    state = state_of(param)
    if state.is_available:
        raise StateError(
            "it is whole, and its shards would move to other ranks",
            where=state.name,
            fix="leave GatheredParameters before",
        )
    whole = state.whole()
    if not is_kept:
        return
    home = None if state.piece.device == state.device else state.piece.device
    point_at(param, whole)
    make_sharded(param, StandaloneShard(param, state.name, ranks, home=home, builder=state.builder))
    point_at_nothing(param)


def store_whole(param: torch.nn.Parameter, whole: torch.Tensor) -> None:
    """Gives a sharded parameter that is released the values ``whole``, which all ranks have."""
    state = state_of(param)
    point_at(param, whole)
    state.store(param)
    point_at_nothing(param)


def _place_of(keys: dict[str, Any]) -> str | None:
    """The place of weights in a configuration; None if it names none. Only this key is read, as in ``_dtype_of``."""
    place: Any = keys
    for name in ("zero_optimization", "offload_param", "device"):
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, str) else None


def _local_of(keys: dict[str, Any]) -> LocalTransport:
    """The transport between ranks of one host, from a configuration. Only this key is read, as in ``_dtype_of``."""
    section = keys.get("comm")
    local = section.get("local", "auto") if isinstance(section, dict) else "auto"
    if local not in get_args(LocalTransport):
        raise ConfigError(
            f"{local!r} is not a way of communication between ranks of one host",
            where="comm.local",
            fix='write "auto", "shm" or "off"',
        )
    return local


def _dtype_of(keys: dict[str, Any]) -> torch.dtype | None:
    """The dtype of computation in a configuration; None if it names none.

    Only the keys of the dtype are read. All other keys may still have values that are filled in later ("auto").
    """
    for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = keys.get(name)
        if (section.get("enabled") if isinstance(section, dict) else keys.get(f"{name}.enabled")) is True:
            return dtype
    return None


def _kept_of(keys: dict[str, Any]) -> str | list[str]:
    """The setting for buffers that stay in fp32, from a configuration. Only this key is read, as in ``_dtype_of``."""
    where = "data_types.keep_in_fp32_modules"
    section = keys.get("data_types")
    kept = keys.get(where, section.get("keep_in_fp32_modules", "auto") if isinstance(section, dict) else "auto")
    if kept != "auto" and not (isinstance(kept, (list, tuple)) and all(isinstance(name, str) for name in kept)):
        raise ConfigError(
            f"{kept!r} is no list of names", where=where, fix='write a list of patterns of names, or "auto"'
        )
    return kept


def _standalone_in(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in module.parameters() if isinstance(state_of(param), StandaloneShard)]


def _acquire_standalone(module: torch.nn.Module, args: Any) -> None:
    """Makes the parameters whole before ``layer.weight`` of a parametrized layer is computed: transformers reads
    ``layer.weight`` to find out whether it exists. Collective if no engine holds the parameters. If an engine holds
    them, the engine's hooks gather them instead."""
    for param in _standalone_in(module):
        state_of(param).acquire([param])


def _give_back_standalone(module: torch.nn.Module, args: Any, output: Any) -> None:
    for param in _standalone_in(module):
        if state_of(param).is_available:
            state_of(param).give_back([param])


def _shard_assigned(module: torch.nn.Module, key: str, param: torch.nn.Parameter | None) -> None:
    """Shards a parameter with values that takes the place of one without (on the meta device), as transformers loads
    quantized models and any model whose construction it does not shard itself."""
    empty = module._parameters.get(key)
    if not _open or empty is None or not empty.is_meta or module.__dict__.get(_BUILDING):
        return
    if param is not None and not param.is_meta and state_of(param) is None:
        _open[-1].shard_param(param, f"{type(module).__name__}.{key}")


_patched: dict[type, tuple[Callable, Callable]] = {}  # class -> (its own __init__, the replacement)
_replaced: dict[str, Callable] = {}  # torch's own functions under the names in _CONSTRUCTORS
_assignments: list[torch.utils.hooks.RemovableHandle] = []  # one while a context is open
_orig_init_subclass = torch.nn.Module.__dict__.get("__init_subclass__")
_BUILDING = "_dsc_building"


def _wrap_init(cls: type) -> None:
    original = cls.__dict__.get("__init__")
    if original is None or cls in _patched:
        return

    @functools.wraps(original)
    def construct(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        # The __init__ of a base class runs within this one. All parameters exist only after the outermost __init__.
        depth = module.__dict__.get(_BUILDING, 0)
        module.__dict__[_BUILDING] = depth + 1
        try:
            original(module, *args, **kwargs)
        finally:
            if depth:
                module.__dict__[_BUILDING] = depth
            else:
                module.__dict__.pop(_BUILDING, None)
        if depth == 0 and _open:
            _open[-1]._shard_unused()
            _open[-1]._shard_module(module)
            # Now the model has all names of buffers to keep in fp32, and no checkpoint has been copied into the buffers
            # yet.
            keep_buffers_in_fp32(module, _open[-1]._keep_in_fp32, _open[-1].dtype)
            if isinstance(module, ParametrizationList):
                module.register_forward_pre_hook(_acquire_standalone)
                module.register_forward_hook(_give_back_standalone, always_call=True)

    _patched[cls] = original, construct
    cls.__init__ = construct


def _all_subclasses(cls: type) -> list[type]:
    found: dict[type, None] = {}
    todo = [cls]
    while todo:
        for sub in type.__subclasses__(todo.pop()):
            if sub not in found:
                found[sub] = None
                todo.append(sub)
    return list(found)


def _patch_modules() -> None:
    for cls in _all_subclasses(torch.nn.Module):
        _wrap_init(cls)

    def init_subclass(cls: type, **kwargs: Any) -> None:
        super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        _wrap_init(cls)

    torch.nn.Module.__init_subclass__ = classmethod(init_subclass)
    _assignments.append(register_module_parameter_registration_hook(_shard_assigned))


def _unpatch_modules() -> None:
    _assignments.pop().remove()
    while _patched:
        cls, (original, construct) = _patched.popitem()
        if cls.__dict__.get("__init__") is construct:  # not replaced by other code meanwhile
            cls.__init__ = original
    if _orig_init_subclass is None:
        del torch.nn.Module.__init_subclass__
    else:
        torch.nn.Module.__init_subclass__ = _orig_init_subclass


def _patch_constructors(init: Init) -> None:
    _unpatch_constructors()
    # Torch caches its set of constructors at the first call. This call makes torch cache its own functions and not the
    # replacements below.
    _device._device_constructors()
    _replaced.update((name, getattr(torch, name)) for name in _CONSTRUCTORS)
    places = DeepSpeedTensorOverride.device in init.tensor_overrides and init.device.type != "cpu"
    casts = DeepSpeedTensorOverride.dtype in init.tensor_overrides and (init.dtype is not None or places)
    if not (places or casts):
        return
    dtype = (init.dtype or torch.get_default_dtype()) if casts else None
    device = init.device if DeepSpeedTensorOverride.device in init.tensor_overrides else None
    for name, original in _CONSTRUCTORS.items():
        # The wrapper is looked up each time, because other libraries replace it by their own.
        wrapper = globals()["zero_wrapper_for_fp_tensor_constructor"]
        setattr(torch, name, wrapper(original, dtype, target_device=device))


def _unpatch_constructors() -> None:
    while _replaced:
        setattr(torch, *_replaced.popitem())


def shutdown_init_context() -> None:
    """Suspends the open contexts: modules that are constructed from now on are not sharded. ``restore_init_context``
    undoes it."""
    for context in _open:
        context.shard_edited(keep=True)
    _suspended.append(list(_open))
    if _open:
        _open.clear()
        _unpatch_constructors()
        _unpatch_modules()


def restore_init_context() -> None:
    """Opens the contexts that ``shutdown_init_context`` has suspended."""
    if _suspended and (contexts := _suspended.pop()):
        _patch_modules()
        _open.extend(contexts)
        _patch_constructors(_open[-1])


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Within this context no ``zero.Init`` is open."""
    shutdown_init_context()
    try:
        yield
    finally:
        restore_init_context()


def materialize(
    model: torch.nn.Module,
    device: torch.device,
    then: Callable[[torch.nn.Module, str], None] = lambda module, name: None,
    only: Container[torch.nn.Module] | None = None,
) -> None:
    """Initialises parameters and buffers that are on the meta device, module by module. It calls each module's own
    ``reset_parameters``, then Hugging Face's ``_init_weights`` of the model, then ``then(module, name)``. ``only``: the
    modules whose own tensors are initialised; default: all.

    Raises ModelError if a module has no such method, because its values would be uninitialised memory.
    """
    init_weights = getattr(model, "_init_weights", None)
    tied: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if not any(t.is_meta for t in own) or (only is not None and module not in only):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None and init_weights is None:
            raise ModelError(
                f"a {type(module).__name__} on the meta device has no reset_parameters(), so its values cannot be made",
                where=name or type(model).__name__,
                fix="give the class a reset_parameters method, or construct the model within deepspeed_c.zero.Init",
            )
        made: list[torch.nn.Parameter] = []
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param in tied:
                    module._parameters[key] = tied[param]
                    continue
                new = torch.nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                new.__dict__.update(param.__dict__)
                tied[param] = module._parameters[key] = new
                made.append(new)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
        with torch.no_grad():
            if reset is not None and (made or any(b is not None for b in module._buffers.values())):
                reset()
            if init_weights is not None:  # the model's own distribution, for the types of modules that it handles
                init_weights(module)
        then(module, name)
