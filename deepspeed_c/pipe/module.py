"""A model as a list of layers. Each rank builds and holds only the layers of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deepspeed_c.comm import init_distributed, is_initialized
from deepspeed_c.comm.axes import PP, TOKENS, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.config.parallel import LocalTransport
from deepspeed_c.errors import CommError, ConfigError, RecomputeError, StateError
from deepspeed_c.pipe.layer_times import lent, measure_layers
from deepspeed_c.pipe.partition import partition_layers
from deepspeed_c.pipe.schedule import make_table, traits_of
from deepspeed_c.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
    cut_over_tensors,
    mesh_of_topology,
)
from deepspeed_c.pipe.writable import copied, needs_gradient
from deepspeed_c.recompute.configured import checkpoint
from deepspeed_c.utils.runtime import call_to_str, set_random_seed
from deepspeed_c.zero.layout.cuts import mark_tied
from deepspeed_c.zero.weights.init import Init, open_context, shard_anew, store_whole, suspended
from deepspeed_c.zero.weights.param import StandaloneShard, shape_of, state_of, whole_of

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

_TIED = "tied_modules"


class LayerSpec:
    """A layer that is built only on the ranks that need it. It consists of a class of ``torch.nn.Module``, or a
    function that makes a module, and the arguments for it."""

    def __init__(self, typename: Callable[..., torch.nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename) or isinstance(typename, torch.nn.Module):
            raise ConfigError(
                f"{typename!r} makes no modules",
                where="LayerSpec(typename)",
                fix="pass a class of torch.nn.Module; a module, or a function of the input, is a layer by itself",
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> torch.nn.Module:
        """A new module. log: accepted, but without effect, because the engine logs the layers built."""
        built = self.typename(*self.module_args, **self.module_kwargs)
        if not isinstance(built, torch.nn.Module):
            raise ConfigError(
                f"{self!r} made a {type(built).__name__}", where="LayerSpec(typename)", fix="have it make a module"
            )
        return built

    def __repr__(self) -> str:
        return call_to_str(
            getattr(self.typename, "__name__", repr(self.typename)), *self.module_args, **self.module_kwargs
        )


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weights with all layers of the same ``key``, in any stage. These layers are one module,
    and their gradients are summed.

    forward_fn: (module, input) -> output, used instead of the module's own forward. tied_weight_attr: in DeepSpeed, the
    names of the shared weights; here the whole module is shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[torch.nn.Module],
        *module_args: Any,
        forward_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(torch.nn.Module):
    """A model cut by layers into stages.

    Args:
        layers: modules, ``LayerSpec``s and functions of one argument, applied one after the other. A tuple goes to the
            next layer as it is.
        num_stages: number of ranks along the pipeline; further ranks hold copies, or parts of layers where the
            configuration has ``tensor_parallel``. topology: a grid of ranks, instead. Ranks along its axis "model" hold
            parts of the same layers: layers that were cut by hand, or that the configuration cuts.
        loss_fn: (outputs of the last layer, labels) -> scalar.
        seed_layers: before each layer is built, seed the generators with ``base_seed`` + the layer's number, by
            ``seed_fn`` if it is given. Weights then do not depend on the number of stages.
        partition_method: "parameters", "uniform", "type:REGEX" of class names, "profile", or the first layer of each
            stage and the number of layers. "profile" runs each layer on some rank, one at a time, and makes the slowest
            stage as fast as it can be.
        activation_checkpoint_interval: number of layers that are recomputed together in the backward; 0: none.
            activation_checkpoint_func: the function for it (default: ``deepspeed_c.checkpointing.checkpoint``).
            checkpointable_layers: names of classes that may be recomputed; default: all classes with parameters.
        dynamic_shape: accepted, but without effect; shapes may always change.
        schedule: a name as in ``"pipeline": {"schedule": ...}``. It decides which rank has which stages.
            virtual_stages: number of stages of a rank; by default the smallest that the schedule supports.
        example_input: inputs of a micro-batch as the first layer gets them, on all ranks; for "profile", which needs
            it.

    Within ``zero.Init`` each layer is sharded over the ranks that hold it, and so are modules that ``zero.Init`` has
    sharded over all ranks before.

    Every layer keeps its number as its name ("0.weight"), and layers with a key have names under "tied_modules.KEY". So
    a checkpoint fits any number of stages.

    Raises ConfigError for layers, methods and shapes that do not fit, and CommError for ranks that do not fit. With
    "profile" raises ModelError on all ranks if a layer raises an exception.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        example_input: Any = None,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise ConfigError("says neither num_stages nor topology", where="PipelineModule", fix="pass one of them")
        layers = list(layers)
        self._given = [layer if isinstance(layer, torch.nn.Module) else None for layer in layers]
        self.specs = _tie_shared(layers)
        self.loss_fn = loss_fn
        self.schedule, traits = schedule, traits_of(schedule, "PipelineModule(schedule=...)")
        self.virtual_stages = traits.min_virtual if virtual_stages is None else virtual_stages
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._recompute, self._recomputable = activation_checkpoint_func, checkpointable_layers
        self._seed_layers, self._seed_fn, self._base_seed = seed_layers, seed_fn or set_random_seed, base_seed
        if not is_initialized():
            init_distributed()
        with torch.device("cpu"):  # layers may be built on another device, such as "meta"
            self.mesh, self._topology = _lay_out_ranks(num_stages, topology)
        n_ranks = self.num_stages = self.mesh.size(PP)
        self.stage_id = self.mesh.index(PP)
        n_least = max(traits.min_micro_batches_per_rank * n_ranks, 1)
        self.rank_of = make_table(schedule, n_ranks, self.virtual_stages, n_least, "PipelineModule").rank_of
        """The pipeline rank of each stage."""
        self.layer_times_ns: list[int] = []
        """Measured time of each layer's forward and backward; empty unless partition_method is "profile"."""
        self.parts = partition_layers(
            partition_method,
            len(self.rank_of),
            [_kind_of(spec) for spec in self.specs],
            _sizes_of(self.specs, self._given, n_ranks),
            lambda: self._measure(example_input),
        )
        """The first layer of each stage, and the number of layers."""
        self.stages = [stage for stage, rank in enumerate(self.rank_of) if rank == self.stage_id]
        """This rank's stages, ascending."""
        context = open_context()
        self._take_given(context)
        with self._sharding(context):
            for index in self._own_layers():
                self._build(index)
        self._mark_tied()
        self._share_tied(context)

    def ranks_of_layers(self, local: LocalTransport) -> Collectives:
        """The ranks that hold the same layers, or the same parts of them: ``zero.Init`` shards over these. local: the
        transport between ranks of one host. Collective.
        """
        return self._mesh_of_shards(local).tokens

    def _mesh_of_shards(self, local: LocalTransport) -> Mesh:
        # Not self.mesh: the engine chooses the transport of that one.
        comm = Collectives()
        comm.use_shared_memory(local)
        return mesh_of_topology(self._topology, comm)

    @contextmanager
    def _sharding(self, context: Init | None) -> Iterator[None]:
        """Within this context a ``zero.Init``, if there is one, shards over the ranks of this rank's layers.
        Collective.

        Raises ConfigError on all ranks if its caller has given it a group with ranks of other layers.
        """
        if context is None:
            yield
            return
        ranks = self.ranks_of_layers(context.local)
        others = _beyond(context.comm, ranks) if context.is_group_given else []
        _refuse_foreign(others, self.mesh.comm)
        with context.over(ranks):
            yield

    def _take_given(self, context: Init | None) -> None:
        """Shards modules among the layers, which ``zero.Init`` has sharded over all ranks, over the ranks that hold
        them. Collective, because all ranks have these modules.

        Raises ConfigError on all ranks if they are sharded over some ranks of several stages, or if ranks had different
        parts of a parameter.
        """
        holders: dict[int, tuple[torch.nn.Parameter, set[int]]] = {}
        for index, module in enumerate(self._given):
            if module is not None:
                rank = self.rank_of[self.stage_owner(index)]
                for param in module.parameters():
                    if isinstance(state_of(param), StandaloneShard):
                        holders.setdefault(id(param), (param, set()))[1].add(rank)
        del self._given
        if not holders:
            return
        if context is not None:
            context.shard_edited(keep=True)
        mesh = self._mesh_of_shards("auto" if context is None else context.local)
        n_ranks = mesh.comm.world_size
        lost = [
            state_of(param).comm
            for param, _ in holders.values()
            if state_of(param).comm.world_size < n_ranks or getattr(param, "tensor_model_parallel", False)
        ]
        _refuse_foreign([rank for comm in lost for rank in _beyond(comm, mesh.tokens)], mesh.comm)
        for param, of in holders.values():
            if state_of(param).comm.world_size == n_ranks > mesh.tokens.world_size:
                shard_anew(param, mesh.tokens, is_kept=self.stage_id in of)

    def _share_tied(self, context: Init | None) -> None:
        """``share_tied`` within an open ``zero.Init``."""
        if context is not None:
            context.shard_edited(keep=True)
            self.share_tied(self._mesh_of_shards(context.local))

    def share_tied(self, mesh: Mesh) -> None:
        """Gives sharded weights of tied layers the values of the first stage with the key. Collective over the ranks of
        these stages. (The engine does it for whole weights.)

        mesh: has the same pipelines.
        """
        tied = {key: ranks for key, ranks in self.tied_ranks().items() if len(ranks) > 1}
        mesh.connect_some(sorted(set(tied.values())), PP, *TOKENS)
        for key, ranks in tied.items():  # in one order on all ranks
            module = self._tied_module(key)
            for name, param in () if module is None else module.named_parameters():
                if state_of(param) is not None:
                    whole = whole_of(param)
                    mesh.among(ranks, PP, *TOKENS).broadcast(whole, 0, label=f"{_TIED}.{key}.{name}")
                    store_whole(param, whole)

    def _measure(self, example_input: Any) -> list[int]:
        if example_input is None:
            raise ConfigError(
                '"profile" runs the layers, and there is no input',
                where="PipelineModule(example_input=...)",
                fix="pass the inputs of one micro-batch, as the first layer gets them",
            )
        names = [f"layer {index} ({_kind_of(spec)})" for index, spec in enumerate(self.specs)]
        if sharded := [name for name, module in zip(names, self._given) if module is not None and _is_sharded(module)]:
            raise ConfigError(
                f'"profile" runs each layer on one rank, and the weights of {sharded[0]} are sharded over several',
                where="PipelineModule(partition_method=...)",
                fix="pass a LayerSpec for each layer, or make the modules outside zero.Init",
            )
        with suspended():  # one rank builds a layer by itself
            self.layer_times_ns = measure_layers(names, self._trial, example_input, self.mesh)
        return self.layer_times_ns

    @contextmanager
    def _trial(self, index: int) -> Iterator[Callable[[Any], Any]]:
        """A context in which any layer runs, whichever rank will hold it."""
        spec = self.specs[index]
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if not isinstance(layer, torch.nn.Module):
            yield layer
            return
        with self._lent(layer):
            forward_fn = getattr(spec, "forward_fn", None)
            yield layer if forward_fn is None else partial(forward_fn, layer)

    def _lent(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        return lent(layer)

    def _own_layers(self) -> list[int]:
        """The layers of this rank's stages, ascending."""
        return [index for stage in self.stages for index in range(self.parts[stage], self.parts[stage + 1])]

    def _build(self, index: int) -> None:
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec):
            self._build_tied(spec)
            return
        if isinstance(spec, LayerSpec):
            self._seed(index)
            spec = spec.build()
        if isinstance(spec, torch.nn.Module):
            self.add_module(str(index), spec)

    def _build_tied(self, spec: TiedLayerSpec) -> None:
        if not hasattr(self, _TIED):
            self.add_module(_TIED, torch.nn.ModuleDict())
        tied = getattr(self, _TIED)
        if spec.key not in tied:
            # The seed is that of the first layer with the key, on all ranks that build the module.
            first = next(i for i, other in enumerate(self.specs) if getattr(other, "key", None) == spec.key)
            self._seed(first)
            tied[spec.key] = self.specs[first].build()

    def _layer(self, index: int) -> Callable[[Any], Any]:
        """One of this rank's layers. A cut over tensor-parallel ranks may have put another module in its place."""
        spec = self.specs[index]
        if isinstance(spec, TiedLayerSpec):
            module = getattr(self, _TIED)[spec.key]
            return module if spec.forward_fn is None else partial(spec.forward_fn, module)
        return self._modules.get(str(index), spec)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each of this rank's layers by itself, in place, with ``torch.compile``. The arguments are those of
        ``torch.nn.Module.compile``. Functions among the layers, and the ``forward_fn`` of tied layers, run as they are.
        """
        for index in self._own_layers():
            layer = self._layer(index)
            if isinstance(layer, torch.nn.Module):
                layer.compile(*args, **kwargs)

    def lie_on(self, mesh: Mesh) -> None:
        """Takes ``mesh``, which has the same pipelines. Its tensor-parallel ranks lie within stages from now on."""
        if mesh.size(TP) != max(1, self._topology.get_dim("model")):
            self._topology = cut_over_tensors(self._topology, mesh.size(TP))
        self.mesh = mesh

    def repeated_layers(self) -> list[str]:
        """Names of this rank's layers whose class occurs several times in the whole model. ``"layers": "auto"``
        recomputes these layers.

        Raises ConfigError, on all ranks, where no class of layers occurs twice.
        """
        kinds = [None if isinstance(spec, TiedLayerSpec) else _maker_of(spec) for spec in self.specs]
        repeated = {kind for kind in kinds if kind is not None and kinds.count(kind) >= 2}
        if not repeated:
            raise ConfigError(
                f'"auto" finds no repeated layers: no class is there twice among the {len(kinds)} layers of the'
                " PipelineModule",
                where="activation_checkpointing.layers",
                fix=r'name the layers by a regular expression, such as "[2-9]"',
            )
        names = [str(index) for index in self._own_layers() if kinds[index] in repeated]
        # A layer without child modules keeps little but its input. It is recomputed only if there are no other layers.
        deep = [name for name in names if next(self.get_submodule(name).children(), None) is not None]
        return deep or names

    def _seed(self, index: int) -> None:
        if self._seed_layers:
            self._seed_fn(int(self._base_seed) + index)

    def _tied_module(self, key: str) -> torch.nn.Module | None:
        tied = getattr(self, _TIED, None)
        return tied[key] if tied is not None and key in tied else None

    def tied_ranks(self) -> dict[str, tuple[int, ...]]:
        """For every key, the pipeline ranks that have layers with the key."""
        ranks: dict[str, set[int]] = {}
        for index, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                ranks.setdefault(spec.key, set()).add(self.rank_of[self.stage_owner(index)])
        return {key: tuple(sorted(found)) for key, found in ranks.items()}

    def saved_ties(self) -> dict[str, list[int]]:
        """For every key, the numbers of the layers in whose files DeepSpeed would save its weights: those without a
        ``forward_fn``, or the first if there are none."""
        layers: dict[str, list[TiedLayerSpec]] = {}
        numbers: dict[str, list[int]] = {}
        for index, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                layers.setdefault(spec.key, []).append(spec)
                numbers.setdefault(spec.key, []).append(index)
        return {
            key: [n for n, spec in zip(of_key, layers[key], strict=True) if spec.forward_fn is None] or of_key[:1]
            for key, of_key in numbers.items()
        }

    def _mark_tied(self) -> None:
        """Store in each weight of a tied module which pipeline ranks have a copy of it."""
        for key, ranks in self.tied_ranks().items():
            module = self._tied_module(key) if len(ranks) > 1 else None
            for tensor in () if module is None else (*module.parameters(), *module.buffers()):
                mark_tied(tensor, ranks)

    def forward(self, forward_input: Any) -> Any:
        """Run this rank's layers. If the rank has several stages of a longer pipeline, use ``run_stage`` for one of
        them.
        """
        if len(self.stages) > 1 and self.num_stages > 1:
            raise StateError(
                f"this rank has the stages {self.stages}, which do not follow one another",
                where="PipelineModule.forward",
                fix="call engine.train_batch or eval_batch",
            )
        for stage in self.stages:
            forward_input = self.run_stage(stage, forward_input)
        return forward_input

    def run_stage(self, stage: int, value: Any) -> Any:
        """Apply the layers of one stage of this rank."""
        indices = range(self.parts[stage], self.parts[stage + 1])
        every = self.activation_checkpoint_interval
        if every <= 0 or not torch.is_grad_enabled():
            return self._run_layers(indices, value)
        for i in range(0, len(indices), every):
            run = indices[i : i + every]
            if self._may_recompute(run):
                value = self._run_recomputed(run, value)
            else:
                value = self._run_layers(run, value)
        return value

    def _run_recomputed(self, indices: Sequence[int], value: Any) -> Any:
        inputs = _as_tuple(value)
        if self._recompute is not checkpoint and not any(map(needs_gradient, inputs)):
            # A reentrant function, like torch's, has a backward only if an input requires a gradient.
            inputs = tuple(
                each.detach().requires_grad_() if torch.is_tensor(each) and each.is_floating_point() else each
                for each in inputs
            )
        # The kept inputs have to stay as they are, even if the first of the layers writes to its input.
        outputs = self._recompute(lambda *values: self._run_layers(indices, copied(values)), *inputs)
        has_backward = any(map(needs_gradient, tree_leaves(outputs)))
        params = () if has_backward else (p for i in indices for p in getattr(self._layer(i), "parameters", tuple)())
        if any(map(needs_gradient, params)):
            raise RecomputeError(
                f"layers {indices[0]} to {indices[-1]} have parameters to train, and their result has no backward",
                where="PipelineModule(activation_checkpoint_func=...)",
                fix="pass partial(torch.utils.checkpoint.checkpoint, use_reentrant=False), or leave it out",
            )
        return outputs

    def _run_layers(self, indices: Iterable[int], value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 1:
            value = value[0]
        for index in indices:
            value = self._layer(index)(value)
        return value

    def _may_recompute(self, indices: Iterable[int]) -> bool:
        layers = [self._layer(index) for index in indices]
        if self._recomputable is not None:
            return all(type(layer).__name__ in self._recomputable for layer in layers)
        return any(isinstance(layer, torch.nn.Module) and any(True for _ in layer.parameters()) for layer in layers)

    def set_checkpoint_interval(self, interval: int) -> None:
        """From now on recompute ``interval`` consecutive layers together; 0: none."""
        if interval < 0:
            raise ConfigError(f"{interval} is negative", where="set_checkpoint_interval", fix="use an integer >= 0")
        self.activation_checkpoint_interval = interval

    def stage_owner(self, layer_idx: int) -> int:
        """The stage to which a layer belongs."""
        if not 0 <= layer_idx < len(self.specs):
            raise ValueError(f"there is no layer {layer_idx}; there are {len(self.specs)}")
        return next(stage for stage, end in enumerate(self.parts[1:]) if layer_idx < end)

    def partitions(self) -> list[int]:
        """The first layer of each stage, and the number of layers."""
        return list(self.parts)

    def topology(self) -> ProcessTopology:
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place in the grid, with Megatron's methods."""
        return PipelineParallelGrid(self._topology, mesh=self.mesh)

    def num_pipeline_stages(self) -> int:
        """Number of ranks along the pipeline."""
        return self.num_stages

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Values, by name, that a subclass wants reported beside the loss; None if there are none."""
        return None


def _lay_out_ranks(num_stages: int | None, topology: ProcessTopology | None) -> tuple[Mesh, ProcessTopology]:
    comm = Collectives()
    if topology is None:
        if num_stages is None or num_stages < 1 or comm.world_size % num_stages:
            raise CommError(
                f"{comm.world_size} ranks cannot be cut into pipelines of {num_stages}",
                where="PipelineModule(num_stages=...)",
                fix=f"use a divisor of {comm.world_size}",
            )
        topology = PipeDataParallelTopology(num_stages, comm.world_size // num_stages)
    elif num_stages is not None and topology.get_dim("pipe") != num_stages:
        raise ConfigError(
            f"num_stages is {num_stages}, the topology has {topology.get_dim('pipe')} along pipe",
            where="PipelineModule",
            fix="pass one of them",
        )
    return mesh_of_topology(topology, comm), topology


def _beyond(comm: Collectives, ranks: Collectives) -> list[int]:
    """The ranks of ``comm`` that are not in ``ranks``."""
    return sorted(set(comm.global_ranks) - set(ranks.global_ranks))


def _refuse_foreign(others: Sequence[int], comm: Collectives) -> None:
    """Raises ConfigError on all ranks of ``comm`` if ``others``, ranks that would get shards of this rank's layers and
    do not hold these, has any on some rank. Collective."""
    found = comm.gather_objects(list(others), label="ranks of other layers")
    for rank, of_rank in enumerate(found):
        if of_rank:
            raise ConfigError(
                f"rank {rank} would share its layers with the ranks {of_rank}, which hold others",
                where="zero.Init(data_parallel_group=...)",
                fix="leave out the group, and pass each layer as a LayerSpec: the ranks that hold it share it",
            )


def _is_sharded(module: torch.nn.Module) -> bool:
    return any(state_of(param) is not None for param in module.parameters())


def _tie_shared(layers: list[Any]) -> list[Any]:
    """The layers, in which a module that occurs several times is one tied layer. Its key is that of its first place.

    Raises ConfigError where different modules share a parameter: on two ranks it would become two parameters.
    """
    places: dict[int, list[int]] = {}
    owners: dict[int, tuple[int, int]] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, torch.nn.Module):
            continue
        places.setdefault(id(layer), []).append(index)
        for param in layer.parameters():
            module, first = owners.setdefault(id(param), (id(layer), index))
            if module != id(layer):
                raise ConfigError(
                    f"layers {first} and {index} share a parameter of shape {tuple(param.shape)}",
                    where="PipelineModule(layers=...)",
                    fix="make both a TiedLayerSpec of one key, with a forward_fn each",
                )
    tied = list(layers)
    for found in places.values():
        for index in found if len(found) > 1 else ():
            module = layers[index]
            tied[index] = TiedLayerSpec(str(found[0]), lambda module=module: module)
    return tied


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _kind_of(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return getattr(spec.typename, "__name__", type(spec.typename).__name__)
    return type(spec).__name__ if isinstance(spec, torch.nn.Module) else getattr(spec, "__name__", type(spec).__name__)


def _maker_of(spec: Any) -> Any:
    """The class of a layer, or the function that makes it; None for a function that is a layer."""
    if isinstance(spec, LayerSpec):
        return spec.typename
    return type(spec) if isinstance(spec, torch.nn.Module) else None


def _numel_alike(param: torch.nn.Parameter) -> int:
    """Number of elements of a parameter. Of a cut one it is the average number of a tensor-parallel rank's part, so
    that ranks with parts of different sizes deal out layers alike."""
    cut = getattr(param, "tp_cut", None)
    return shape_of(param).numel() if cut is None else cut.logical_shape.numel() // cut.n_ranks


def _sizes_of(specs: Sequence[Any], given: Sequence[torch.nn.Module | None], n_ranks: int) -> list[int]:
    """Number of trainable elements of each layer. Layers with one key count each, as in DeepSpeed. Nothing is
    allocated.

    given: the layers that the caller has made. Raises ConfigError, on all ranks, for objects that are no layers, and
    where another layer than these turns out to be sharded over the ranks of several stages.
    """
    sizes: list[int] = []
    for index, spec in enumerate(specs):
        if not isinstance(spec, (LayerSpec, torch.nn.Module)) and not callable(spec):
            raise ConfigError(
                f"{spec!r} is no layer",
                where=f"PipelineModule(layers=...)[{index}]",
                fix="pass a module, a LayerSpec or a function of one argument",
            )
        module = spec
        if isinstance(spec, LayerSpec):
            with torch.device("meta"):
                module = spec.build()
        if n_ranks > 1 and isinstance(spec, LayerSpec) and given[index] is None and _is_sharded(module):
            raise ConfigError(
                f"{spec!r} returns a module that zero.Init has sharded over all ranks",
                where=f"PipelineModule(layers=...)[{index}]",
                fix="pass the module itself, or have the function make a new one",
            )
        params = module.parameters() if isinstance(module, torch.nn.Module) else ()
        sizes.append(sum(_numel_alike(param) for param in params if param.requires_grad))
    return sizes
