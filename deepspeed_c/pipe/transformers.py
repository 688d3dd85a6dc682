"""A causal language model of transformers as a pipeline: its own modules, cut between decoder layers.

[Note: shells] The code of a model's forward stays in use. A *shell* is a copy of a module without copies of its
children, some of which are replaced. The first layers run the shell of the decoder, whose decoder layers are recorders:
they note the arguments (masks, positions) that the model gives to each layer. Decoder layers run with these arguments.
The last layer runs the shell of the whole model, whose decoder only returns its input, for what a model does with its
logits. Modules are shared by shells and by the pipeline, so all see the same weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from deepspeed_c.comm.axes import TP
from deepspeed_c.errors import CheckpointError, FeatureError, ModelError
from deepspeed_c.pipe.fill import fill_from_files, fill_from_model, fill_from_seeds
from deepspeed_c.pipe.layer_times import lent
from deepspeed_c.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_c.pipe.save import Joins, save_folder
from deepspeed_c.weights.configs import save_configs
from deepspeed_c.zero.weights.init import Init, open_context, suspended
from deepspeed_c.zero.weights.param import shape_of

__all__ = ["CausalLMPipeline", "from_transformers"]

_WHERE = "from_transformers"
_TIED_KEY = "embeddings"
LONGEST_EXAMPLE = 512
_INPUTS = ("input_ids", "attention_mask", "position_ids")


class _Family(NamedTuple):
    """Names of a decoder's parts."""

    decoder: str
    layers: str
    after: tuple[str, ...]
    """Modules between the last layer and the head, in the order of their calls."""
    returns_tuple: bool = False
    """Whether decoder layers return tuples."""


_LLAMA = _Family("model", "layers", ("norm",))
_GPT = _Family("transformer", "h", ("ln_f",))
# tests/hf/test_pipeline.py compares each family with the model in one process, and has the reasons of the others.
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "qwen3_next", "phi3"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma", "olmo", "olmo2", "olmo3", "helium"), _LLAMA),
    **dict.fromkeys(("granite", "glm", "glm4", "smollm3", "stablelm", "starcoder2", "cohere", "cohere2"), _LLAMA),
    **dict.fromkeys(("apertus", "arcee", "bitnet", "cwm", "diffllama", "doge", "ernie4_5", "exaone4"), _LLAMA),
    **dict.fromkeys(("hunyuan_v1_dense", "hyperclovax", "jais2", "nemotron", "seed_oss"), _LLAMA),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmoe"), _LLAMA),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "glm4_moe", "ernie4_5_moe", "exaone_moe", "jetmoe"), _LLAMA),
    **dict.fromkeys(("minimax_m2", "phimoe", "flex_olmo", "afmoe", "solar_open"), _LLAMA),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT),
    **dict.fromkeys(("gptj", "codegen", "falcon", "bloom"), _GPT._replace(returns_tuple=True)),
    "mpt": _Family("transformer", "blocks", ("norm_f",), returns_tuple=True),
    "opt": _Family("model.decoder", "layers", ("final_layer_norm", "project_out")),
    "gpt_neox": _Family("gpt_neox", "layers", ("final_layer_norm",)),
    "phi": _Family("model", "layers", ("final_layernorm",)),
    "persimmon": _Family("model", "layers", ("final_layernorm",)),
    "lfm2": _Family("model", "layers", ("embedding_norm",)),
    "xglm": _Family("model", "layers", ("layer_norm",)),
    "biogpt": _Family("biogpt", "layers", ("layer_norm",)),
}


def from_transformers(
    model: Any,
    num_stages: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> CausalLMPipeline:
    """A causal language model of transformers as a ``PipelineModule``. Collective; no rank holds more than its stages.

    model: a folder of weights (each rank reads those of its stages, by ranges), a configuration (each layer is seeded,
    so weights do not depend on the number of stages), or a model of transformers, from which each rank copies its
    stages; a model on the meta device counts as its configuration. A model may have adapters of peft within its layers:
    call ``get_peft_model`` first. Within ``zero.Init`` a weight is sharded over the ranks of its stage as soon as it
    has its values: a rank holds its part of its stages, and one weight or, of a configuration, one layer. dtype: dtype
    of the weights, except adapters; default: the configuration's. options: as in ``PipelineModule``, such as
    ``schedule`` and ``partition_method``. For "profile" the default of ``example_input`` is one row of token ids, as
    long as the model's longest sequence, and 512 at most.

    A micro-batch of the engine is (inputs, labels). Inputs: input_ids [batch, length], or a dictionary of input_ids,
    attention_mask and position_ids. Labels [batch, length] are shifted by the loss, and -100 is left out, as in
    transformers. Needs transformers (the extra [hf]).

    Raises FeatureError for families and settings that cannot be cut, ModelError for objects that are no such model, and
    CheckpointError if there is no such folder or, on all ranks, if its weights do not fit or cannot be read.
    """
    context = open_context()
    with suspended():  # the values of a weight are made as without zero.Init, before it shards them
        source, skeleton, generation_config = _skeleton_of(model, dtype)
        pipeline = CausalLMPipeline(skeleton, num_stages, generation_config, **options)
        pipeline.fill(source, context)
    return pipeline


class CausalLMPipeline(PipelineModule):
    """The module that ``from_transformers`` makes. ``config`` is the configuration of transformers.

    Names of weights are those of transformers, after the layer's number ("2.model.layers.0.mlp.up_proj.weight"), or
    after "tied_modules.embeddings".
    """

    def __init__(self, skeleton: Any, num_stages: int | None, generation_config: Any = None, **options: Any) -> None:
        """skeleton: the whole model on the meta device; it takes the weights of this rank's stages."""
        options = {"seed_layers": True, **options}
        if "loss_fn" not in options:
            options["loss_fn"] = _loss_of(skeleton)
        if options.get("example_input") is None:
            options["example_input"] = _example_of(skeleton.config)
        specs = _specs_of(skeleton)
        names = _names_of(skeleton)
        # A tuple, so that modules of other stages are no modules of this one.
        self._whole = (skeleton,)
        super().__init__(specs, num_stages=num_stages, **options)
        self.config, self.generation_config = skeleton.config, generation_config
        # Modules of the pipeline do not know which of them transformers keeps in fp32.
        self._keep_in_fp32_modules = skeleton._keep_in_fp32_modules
        self._keep_in_fp32_modules_strict = skeleton._keep_in_fp32_modules_strict
        self._names = names

    def fill(self, source: str | torch.nn.Module | None, context: Init | None) -> None:
        """Give the weights of this rank their values, from a folder, a model, or (None) seeds. ``context`` shards them.
        Collective.
        """
        (skeleton,) = self._whole
        parts = self._parts()
        own = _pruned(skeleton, [path for part in parts.values() for path in part.paths])
        # Each weight is sharded before the next one gets its values.
        then = None if context is None else context.shard_param
        with self._sharding(context):
            if isinstance(source, torch.nn.Module):
                fill_from_model(own, source, self.mesh.comm, then)
            elif source is not None:
                fill_from_files(own, skeleton, source, self.mesh.comm, then)
            else:
                fill_from_seeds(own, {index: part.own_modules() for index, part in parts.items()}, self._seed, then)
        self._mark_tied()
        self._share_tied(context)

    def _lent(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        """As in ``PipelineModule``. The layer's tensors are on the meta device, so it gets random values."""
        (skeleton,) = self._whole
        own = _pruned(skeleton, layer.paths)
        return lent(layer, lambda: fill_from_seeds(own, {0: layer.own_modules()}, lambda _: None))

    def _parts(self) -> dict[int, _ModelPart]:
        """This rank's layers with modules of the model, by the number that seeds them."""
        found: dict[int, _ModelPart] = {}
        for index, spec in enumerate(self.specs):
            module = self._tied_module(spec.key) if isinstance(spec, TiedLayerSpec) else self._modules.get(str(index))
            if isinstance(module, _ModelPart) and module not in found.values():
                found[index] = module
        return found

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], max_shard_size: int | str = "5GB", *, parts: Joins | None = None
    ) -> None:
        """Write the whole model as ``from_pretrained`` of transformers reads it: safetensors, their index,
        config.json, generation_config.json. Collective.

        Rank 0 writes, and gets one tensor after the other, stage by stage in the order of the model. Weights have
        their dtype in training. parts: puts tensors together that tensor-parallel ranks hold parts of, as
        ``engine.save_16bit_model`` does. Raises CheckpointError on all ranks if it cannot be written; an older model
        there is intact then. Raises FeatureError if weights are cut and ``parts`` is None, and for adapters.
        """
        if _adapters_of(self._whole[0]):
            raise FeatureError(
                "from_pretrained would not find the weights of a model with adapters under their names",
                where=f"{type(self).__name__}.save_pretrained",
                fix="call save_checkpoint; for a file of the adapter, load own_tensors() of all stages, without"
                " tensor_parallel, into get_base_model() of the model of peft, and call its save_pretrained",
            )
        if self.mesh.size(TP) > 1 and parts is None:
            raise FeatureError(
                "this rank has parts of tensors",
                where=f"{type(self).__name__}.save_pretrained",
                fix="call the engine's save_16bit_model",
            )
        own = self.own_tensors()
        architecture = type(self._whole[0]).__name__
        dtype = next((tensor.dtype for tensor in own.values() if tensor.is_floating_point()), None)
        save_folder(
            os.fspath(save_directory),
            lambda folder: save_configs(self.config, self.generation_config, architecture, folder, dtype=dtype),
            self._names,
            own,
            self.mesh,
            parts,
            max_shard_size=max_shard_size,
        )

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's weights and buffers of the state dict, by transformers' names."""
        named = {}
        for part in self._parts().values():
            named.update(part.state_dict(keep_vars=True))
        return named

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank has the layers of its stages only."""
        raise FeatureError(
            "generation needs all layers, and this rank has those of its stages",
            where=f"{type(self).__name__}.generate",
            fix="call save_pretrained, and load the folder with deepspeed_c.init_inference or with transformers",
        )


class _ModelPart(torch.nn.Module):
    """Modules of a model, under their paths in it."""

    def __init__(self, skeleton: Any, paths: Sequence[str]) -> None:
        super().__init__()
        self.paths = list(paths)
        for path in paths:
            at: torch.nn.Module = self
            *folders, last = path.split(".")
            for name in folders:
                if name not in at._modules:
                    at.add_module(name, torch.nn.Module())
                at = at._modules[name]
            at.add_module(last, skeleton.get_submodule(path))

    def own_modules(self) -> list[torch.nn.Module]:
        return [self.get_submodule(path) for path in self.paths]


class Words(_ModelPart):
    """The word embedding: inputs -> arguments of the decoder."""

    def forward(self, inputs: Any) -> dict[str, Any]:
        given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        ids = given.pop("input_ids", None)
        unknown = sorted(given.keys() - set(_INPUTS))
        if ids is None or unknown:
            raise ModelError(
                f"its inputs are {', '.join(map(repr, inputs)) if isinstance(inputs, Mapping) else type(inputs)}",
                where=_WHERE,
                fix=f"give input_ids, or a dictionary of {', '.join(_INPUTS)}; labels are the second of the pair",
            )
        (embedding,) = self.own_modules()
        return {"inputs_embeds": embedding(ids), **{name: value for name, value in given.items() if value is not None}}


class Prologue(_ModelPart):
    """All that the decoder does before its first layer: arguments of the decoder -> (hidden states, tensors that layers
    need, the arguments of each layer)."""

    def __init__(self, skeleton: Any, paths: Sequence[str], family: _Family) -> None:
        super().__init__(skeleton, paths)
        decoder = skeleton.get_submodule(family.decoder)
        layers = decoder.get_submodule(family.layers)
        self._calls: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []
        recorders = [_Recorder(layer, self._calls, family.returns_tuple) for layer in layers]
        others = {name: torch.nn.Identity() for name in family.after if getattr(decoder, name, None) is not None}
        self._decoder = (_shell(decoder, {family.layers: torch.nn.ModuleList(recorders), **others}),)

    def forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        self._calls.clear()
        # train() and eval() do not reach the shell, whose code may drop elements itself.
        self._decoder[0].training = self.training
        self._decoder[0](**given, use_cache=False)
        hidden = self._calls[0][0]
        tensors: dict[int, torch.Tensor] = {}
        kinds: list[Any] = []
        kind_of = []
        for _, args, kwargs in self._calls:
            kind = _without_tensors((args, kwargs), tensors)
            if kind not in kinds:
                kinds.append(kind)
            kind_of.append(kinds.index(kind))
        self._calls.clear()
        return (hidden, *tensors.values(), _Calls(tuple(kinds), tuple(kind_of)))


class DecoderLayer(_ModelPart):
    """A decoder layer: the value of ``Prologue`` -> the same, with other hidden states."""

    def __init__(self, skeleton: Any, paths: Sequence[str], index: int) -> None:
        super().__init__(skeleton, paths)
        self._index = index

    def forward(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *tensors, calls = value
        args, kwargs = _with_tensors(calls.kinds[calls.kind_of[self._index]], tensors)
        (layer,) = self.own_modules()
        output = layer(hidden, *args, **kwargs)
        return (output[0] if isinstance(output, tuple) else output, *tensors, calls)


class FinalNorm(_ModelPart):
    """Modules between the last decoder layer and the head: the value of ``DecoderLayer`` -> hidden states."""

    def forward(self, value: tuple[Any, ...]) -> torch.Tensor:
        hidden = value[0]
        for module in self.own_modules():
            hidden = module(hidden)
        return hidden


class Head(_ModelPart):
    """The head, and what the model does with its output: hidden states -> logits."""

    def __init__(
        self,
        skeleton: Any,
        paths: Sequence[str],
        run: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(skeleton, paths)
        self._run = run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._run(self, hidden)


class _Recorder(torch.nn.Module):
    """Notes a decoder layer's arguments, and returns its input. Other attributes are the layer's."""

    def __init__(self, layer: torch.nn.Module, calls: list[Any], returns_tuple: bool) -> None:
        super().__init__()
        self._layer, self._calls, self._returns_tuple = (layer,), calls, returns_tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((hidden_states, args, kwargs))
        return (hidden_states, None) if self._returns_tuple else hidden_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"][0], name)


class _Outputs(tuple):
    """The output of a decoder, of which only the hidden states are known."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _GivenDecoder(torch.nn.Module):
    """A decoder that returns its input."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Outputs:
        return _Outputs((inputs_embeds,))


class _TiedHead(torch.nn.Module):
    """A head without bias whose weight is that of the word embedding."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self._embedding = (embedding,)

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight)


@dataclass(frozen=True)
class _Calls:
    """The arguments of each decoder layer. Tensors are numbers of them (``_At``) in the value."""

    kinds: tuple[Any, ...]
    kind_of: tuple[int, ...]
    """The number in ``kinds`` for each layer."""


@dataclass(frozen=True)
class _At:
    """The place of a tensor in a value."""

    index: int


def _without_tensors(nest: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """``nest`` with places instead of tensors, which are added to ``tensors`` by their id."""
    if torch.is_tensor(nest):
        tensors.setdefault(id(nest), nest)
        return _At(list(tensors).index(id(nest)))
    if isinstance(nest, dict):
        return {key: _without_tensors(value, tensors) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return tuple(_without_tensors(value, tensors) for value in nest)
    return nest


def _with_tensors(nest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(nest, _At):
        return tensors[nest.index]
    if isinstance(nest, dict):
        return {key: _with_tensors(value, tensors) for key, value in nest.items()}
    return tuple(_with_tensors(value, tensors) for value in nest) if isinstance(nest, tuple) else nest


def _skeleton_of(model: Any, dtype: torch.dtype | None) -> tuple[Any, Any, Any]:
    """(what the values come from, the whole model on the meta device, its configuration of generation)."""
    try:
        import transformers
    except ImportError as error:
        raise FeatureError("is not installed", where="transformers", fix="pip install 'deepspeed_c[hf]'") from error
    source, config, made_by = None, model, transformers.AutoModelForCausalLM.from_config
    if isinstance(model, (str, os.PathLike)):
        source = os.fspath(model)
        if not os.path.isfile(os.path.join(source, "config.json")):
            raise CheckpointError(
                "is no folder with a config.json",
                where=source,
                fix="name a folder that save_pretrained has written; one of a hub has to be fetched first",
            )
        config = transformers.AutoConfig.from_pretrained(source)
    elif isinstance(adapted := _without_wrapper(model), transformers.PreTrainedModel):
        model = adapted
        config, made_by = model.config, type(model)._from_config
        if _has_values(model):
            source = model
        elif _adapters_of(model):
            raise ModelError(
                "its adapters have no values", where=_WHERE, fix="adapt a model that is not on the meta device"
            )
        dtype = model.dtype if dtype is None else dtype
    elif not isinstance(model, transformers.PreTrainedConfig):
        raise ModelError(
            f"is a {type(model).__name__}",
            where=f"{_WHERE}(model=...)",
            fix="pass a folder, a configuration of transformers or one of its models",
        )
    config = copy.deepcopy(config)
    _check_config(config)
    with torch.device("meta"):
        skeleton = made_by(config, **({} if dtype is None else {"dtype": dtype}))
    if _adapters_of(model):
        skeleton = _with_adapters(skeleton, model)
    if skeleton.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no head of words", where=_WHERE, fix="pass a model of class ...ForCausalLM"
        )
    generation = skeleton.generation_config
    if isinstance(model, transformers.PreTrainedModel):
        generation = model.generation_config
    elif source is not None and os.path.exists(os.path.join(source, "generation_config.json")):
        generation = transformers.GenerationConfig.from_pretrained(source)
    return source, skeleton.eval(), copy.deepcopy(generation)


def _has_values(model: torch.nn.Module) -> bool:
    return not all(tensor.is_meta for tensor in model.parameters())


def _without_wrapper(model: Any) -> Any:
    """The model of transformers that holds the adapters, if ``model`` is a model of peft."""
    if not _adapters_of(model) or not callable(getattr(model, "get_base_model", None)):
        return model
    for name, adapter in _adapters_of(model).items():
        if getattr(adapter, "is_prompt_learning", False):
            raise FeatureError(
                f"adapter {name!r} ({adapter.peft_type}) puts learned tokens before those of the batch, and stages do"
                " not run that",
                where=_WHERE,
                fix="use an adapter within layers, such as LoRA",
            )
    return model.get_base_model()


def _adapters_of(model: Any) -> Mapping[str, Any]:
    """The configurations of the adapters of peft, by name."""
    return getattr(model, "peft_config", None) or {}


def _with_adapters(skeleton: Any, model: Any) -> Any:
    """A copy of ``model`` on the meta device, because its configuration says nothing about adapters. Weights below and
    beside adapters have the dtypes of ``skeleton``, which the configuration has made.

    Raises ModelError for weights of other shapes than in ``skeleton``, such as quantized ones.
    """
    plain = dict(skeleton.named_parameters(remove_duplicate=False))
    memo: dict[int, Any] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        before = plain.get(name.replace(".base_layer.", ".").replace(".original_module.", "."))
        shape = shape_of(param)
        if before is not None and before.shape != shape:
            raise ModelError(
                f"{name} has shape {tuple(shape)}, the configuration says {tuple(before.shape)}",
                where=_WHERE,
                fix="put adapters on a model with whole weights that are not quantized",
            )
        blank = torch.empty(shape, dtype=param.dtype if before is None else before.dtype, device="meta")
        memo[id(param)] = torch.nn.Parameter(blank, param.requires_grad)
    memo.update((id(buffer), buffer.to("meta")) for buffer in model.buffers())
    return copy.deepcopy(model, memo)


def _check_config(config: Any) -> None:
    """Raise FeatureError for what a pipeline cannot run."""
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        raise FeatureError(
            f"models of type {kind!r} cannot be cut into stages yet",
            where=_WHERE,
            fix=f"use one of {', '.join(sorted(_FAMILIES))}, or write the layers as a PipelineModule",
        )
    for name in ("output_router_logits", "layerdrop", "add_cross_attention"):
        if getattr(config, name, None):
            raise FeatureError(
                f"{name} is {getattr(config, name)!r}, and stages do not run that",
                where=f"{_WHERE}, {type(config).__name__}.{name}",
                fix=f"set it to {type(getattr(config, name))()!r}",
            )


def _specs_of(skeleton: Any) -> list[LayerSpec]:
    """The layers of the pipeline. Every weight of the model is in one of them."""
    family = _FAMILIES[skeleton.config.model_type]
    paths = {id(module): path for path, module in skeleton.named_modules()}
    decoder = skeleton.get_submodule(family.decoder)
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    words, head_path = paths[id(embedding)], paths[id(head)]
    after = [f"{family.decoder}.{name}" for name in family.after if getattr(decoder, name, None) is not None]
    layers = [f"{family.decoder}.{family.layers}.{i}" for i in range(len(decoder.get_submodule(family.layers)))]
    children = [name for name, _ in decoder.named_children() if name not in (family.layers, *family.after)]
    before = [path for path in (f"{family.decoder}.{name}" for name in children) if path != words]
    is_tied = head.weight is embedding.weight
    replaced: dict[str, torch.nn.Module] = {family.decoder: _GivenDecoder()}
    if is_tied:
        replaced[head_path] = _TiedHead(embedding)
    whole = _shell(skeleton, replaced)

    def run_head(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        whole.training = module.training
        return whole(inputs_embeds=hidden, use_cache=False, return_dict=True).logits

    if is_tied:
        first: LayerSpec = TiedLayerSpec(_TIED_KEY, Words, skeleton, [words])
        last: LayerSpec = TiedLayerSpec(_TIED_KEY, Words, skeleton, [words], forward_fn=run_head)
    else:
        first, last = LayerSpec(Words, skeleton, [words]), LayerSpec(Head, skeleton, [head_path], run_head)
    _check_coverage(skeleton, [words, *before, *layers, *after, *(() if is_tied else (head_path,))])
    return [
        first,
        LayerSpec(Prologue, skeleton, before, family),
        *(LayerSpec(DecoderLayer, skeleton, [path], index) for index, path in enumerate(layers)),
        LayerSpec(FinalNorm, skeleton, after),
        last,
    ]


def _check_coverage(skeleton: Any, paths: Sequence[str]) -> None:
    modules = [skeleton.get_submodule(path) for path in paths]
    covered = {id(tensor) for module in modules for tensor in module.state_dict(keep_vars=True).values()}
    lost = [name for name, tensor in skeleton.state_dict(keep_vars=True).items() if id(tensor) not in covered]
    if lost:
        raise FeatureError(
            f"{type(skeleton).__name__} has weights that belong to no layer of a pipeline: {', '.join(lost[:5])}",
            where=_WHERE,
            fix="write the layers as a PipelineModule",
        )


def _names_of(skeleton: Any) -> list[str]:
    """The names of a saved model's tensors: each tensor has the first of its names."""
    seen: set[int] = set()
    named = skeleton.state_dict(keep_vars=True)
    return [name for name, tensor in named.items() if id(tensor) not in seen and not seen.add(id(tensor))]


def _example_of(config: Any) -> torch.Tensor:
    """Token ids [1, length]."""
    length = min(getattr(config, "max_position_embeddings", None) or LONGEST_EXAMPLE, LONGEST_EXAMPLE)
    return torch.arange(length).remainder(config.vocab_size).unsqueeze(0)


def _loss_of(skeleton: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The loss that the model itself computes: logits are shifted, in fp32, and labels of -100 are left out."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return skeleton.loss_function(logits, labels, vocab_size=skeleton.config.vocab_size)

    return loss


def _shell(module: torch.nn.Module, replaced: Mapping[str, torch.nn.Module]) -> Any:
    """A copy of ``module`` that shares its children, except for ``replaced`` (by path)."""
    shell = copy.copy(module)
    children = shell.__dict__["_modules"] = dict(module._modules)
    below: dict[str, dict[str, torch.nn.Module]] = {}
    for path, other in replaced.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = other
        else:
            children[name] = other
    for name, of_child in below.items():
        children[name] = _shell(module._modules[name], of_child)
    return shell


def _pruned(module: torch.nn.Module, paths: Sequence[str]) -> Any:
    """A copy of ``module`` that has only the modules at ``paths``, which it shares."""
    shell = copy.copy(module)
    below: dict[str, list[str]] = {}
    for path in paths:
        name, _, rest = path.partition(".")
        below.setdefault(name, []).append(rest)
    shell.__dict__["_modules"] = {
        name: module._modules[name] if "" in rests else _pruned(module._modules[name], rests)
        for name, rests in below.items()
    }
    return shell
