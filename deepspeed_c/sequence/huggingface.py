"""Models of transformers whose sequences are cut over ranks, without a change in their code.

transformers has a table of attention functions by name. While a model is registered, the table's entry is a function
that calls the previous function on exchanged data: this rank's heads of all tokens. For other models it calls the
previous function directly.

[Note: once a forward] All layers of a forward need the same data about whole sequences (positions, padding, documents).
The first layer gathers the data and the others use it. If a layer runs a second time, another forward has begun, or the
forward is being recomputed. All ranks run the same layers, so they gather at the same places."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.sequence import parallel_state
from deepspeed_c.sequence.collectives import ranks_of
from deepspeed_c.sequence.exchange import gather_heads, gather_tokens
from deepspeed_c.sequence.masks import WholeSequences, check_order, valid_tokens

__all__ = ["Registration", "UlyssesSPAttentionHF", "registration_of"]

# Parts of the class names and types of layers that carry a state along the sequence outside attention.
_RECURRENT = ("mamba", "recurrent", "rwkv", "deltanet", "linear_attention", "linearattention", "ssm", "conv")

# Arguments of transformers' attention functions with a number for each query head, or for each pair of tokens.
_BY_HEAD = ("s_aux", "sinks")
_BY_PAIR = ("position_bias", "alibi", "head_mask")
# Arguments with the places of documents among this rank's tokens. For whole sequences, the places follow from
# positions.
_OF_LOCAL_TOKENS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position", "seq_idx")


class UlyssesSPAttentionHF(torch.nn.Module):
    """An attention function of transformers over tokens of all ranks of a group.

    ``forward`` has the arguments and the result of such a function, for this rank's tokens. ``attn`` is called with all
    tokens of this rank's heads. The constructor's arguments are DeepSpeed's. Each call has its own batch, lengths and
    heads, so the values given here have no effect, except that ``attn_head_count`` and ``kv_head_count`` have to fit
    the ranks.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
        core_attn_implementation: str = "",
    ) -> None:
        super().__init__()
        self.attn = attn
        self.process_group = process_group
        self.world_size = torch.distributed.get_world_size(process_group)
        self.sp_rank = torch.distributed.get_rank(process_group)
        self.disable_in_eval = disable_in_eval
        self.core_attn_implementation = core_attn_implementation
        self.has_mask_of_model = False
        """Whether the model was given a mask in the forward under way. Positions then do not separate documents."""
        self._whole: WholeSequences | None = None
        self._of: tuple[Any, ...] = ()
        self._seen: set[int] = set()

    def forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query: [batch, heads, tokens of this rank, width]. key and value: the same tokens, with key heads.
        attention_mask: the mask that transformers has made for these tokens. kwargs have ``position_ids`` [batch or 1,
        tokens of this rank]: positions in the whole sequence. Returns ([batch, tokens of this rank, heads, width],
        None). Collective.

        Raises ModelError for arguments that cannot be cut over heads, and ConfigError for heads that no plan fits,
        before anything is sent."""
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        comm = ranks_of(self.process_group)
        whole = self._sequences(module, query, attention_mask, kwargs)
        of_tokens = [part.permute(2, 0, 1, 3) for part in (query, key, value)]
        shapes, *gathered = gather_tokens(comm, *of_tokens, whole.tokens)
        plan = shapes.plan
        if plan.repeats_keys:
            heads = torch.tensor(plan.keys, device=query.device)
            gathered[1:] = [part.index_select(2, heads) for part in gathered[1:]]
        q, k, v = (part.permute(1, 2, 0, 3) for part in gathered)
        kwargs = self._of_heads(module, kwargs, plan.query_begin, plan.query_end, shapes.n_heads)
        kwargs["position_ids"] = whole.positions
        mask = self._mask(module, whole, query.shape[0], kwargs)
        with _groups_of(module, plan.group):
            out, _ = self.attn(module, q, k, v, mask, *args, **kwargs)
        out = gather_heads(comm, shapes, out.permute(1, 0, 2, 3))
        return out.permute(1, 0, 2, 3), None

    def _sequences(
        self, module: torch.nn.Module, query: torch.Tensor, mask: Any, kwargs: Mapping[str, Any]
    ) -> WholeSequences:
        """The data of whole sequences. See [Note: once a forward]."""
        batch, _, n_local, _ = query.shape
        positions = kwargs.get("position_ids")
        if not torch.is_tensor(positions) or positions.dim() != 2 or positions.shape[1] != n_local:
            what = "no position_ids" if positions is None else f"position_ids {tuple(positions.shape)}"
            raise ModelError(
                f"gives attention {what}, and this rank has {n_local} tokens of each sequence",
                where=type(module).__name__,
                fix="pass position_ids [batch, tokens] of the whole sequences' places to the model"
                " (UlyssesSPDataLoaderAdapter makes them); a model that does not hand them on cannot be cut so",
            )
        of = positions.data_ptr(), positions._version, positions.shape, positions
        if self._whole is None or self._of[:3] != of[:3] or id(module) in self._seen:
            valid = valid_tokens(mask, batch, n_local)
            self._whole = WholeSequences(
                ranks_of(self.process_group),
                positions.expand(batch, n_local),
                valid,
                has_mask=self.has_mask_of_model,
            )
            self._check_order(module, self._whole)
            self._of, self._seen = of, set()  # holds the tensor, so that no other tensor can get its address
        self._seen.add(id(module))
        return self._whole

    def _check_order(self, module: torch.nn.Module, whole: WholeSequences) -> None:
        """Raises ModelError for a batch that was cut in another order than this attention's."""
        check_order(whole, "contiguous", 1, type(module).__name__)

    def _of_heads(
        self, module: torch.nn.Module, kwargs: Mapping[str, Any], begin: int, end: int, n_heads: int
    ) -> dict[str, Any]:
        """The other arguments of attention, for this rank's heads and all tokens."""
        given = {name: value for name, value in kwargs.items() if name not in _OF_LOCAL_TOKENS}
        for name in _BY_PAIR:
            if torch.is_tensor(given.get(name)):
                raise ModelError(
                    f"gives attention {name} {tuple(given[name].shape)}, which is made of this rank's tokens alone",
                    where=type(module).__name__,
                    fix="use a model whose positions are in its queries and keys (rotary embeddings)",
                )
        for name in _BY_HEAD:
            if torch.is_tensor(given.get(name)) and given[name].shape[:1] == (n_heads,):
                given[name] = given[name][begin:end]
        return given

    def _mask(self, module: torch.nn.Module, whole: WholeSequences, batch: int, kwargs: Mapping[str, Any]) -> Any:
        """The mask in the form of the wrapped attention function."""
        said = kwargs.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if said is None else said)
        window = kwargs.get("sliding_window")
        if "flash" in self.core_attn_implementation or "/" in self.core_attn_implementation:
            return whole.valid  # the function finds documents from positions, and applies the window itself
        return whole.mask(is_causal=is_causal, window=window)

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Let a model of transformers attend over the tokens of ``sequence_parallel_size`` neighbouring ranks.

        model_name_or_path: the model (of PEFT too), or the name or folder of a model that will be made later.
        core_attn_implementation: "sdpa", a flash attention or a kernel of the hub, as in the model's configuration.
        disable_in_eval: outside training each rank's tokens are whole sequences. The other arguments are accepted for
        compatibility with DeepSpeed: batch and length may change freely. Returns the mpu for ``initialize``, None for
        one rank. Collective. When the engine over the model is closed, it restores the function of transformers.

        Raises ConfigError, with the numbers, for ranks and heads that do not fit, and for an attention that cannot be
        cut in this way. Raises ModelError for layers that carry a state along the sequence, and names the layers."""
        if sequence_parallel_size == 1:
            return None
        parallel_state.initialize_sequence_parallel(sequence_parallel_size)
        _register(
            cls,
            model_name_or_path,
            core_attn_implementation,
            parallel_state.get_sequence_parallel_group(),
            micro_batch_size=micro_batch_size,
            disable_in_eval=disable_in_eval,
        )
        return parallel_state


@contextmanager
def _groups_of(module: torch.nn.Module, n_groups: int) -> Iterator[None]:
    """Tell an attention function how many query heads of this rank share a key head."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == n_groups:
        yield
        return
    module.num_key_value_groups = n_groups
    try:
        yield
    finally:
        module.num_key_value_groups = before


class Registration:
    """A model whose attention is computed by ``attention``, or the name of a model that will be made later."""

    def __init__(
        self,
        kind: type[UlyssesSPAttentionHF],
        arguments: Mapping[str, Any],
        config: Any,
        model: torch.nn.Module | None,
    ) -> None:
        """kind, arguments: class and constructor arguments of the attention."""
        self.attention = kind(**arguments)
        self._arguments, self._config = arguments, config
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._has_modules = model is not None
        """Whether the registration is for one certain model. It is then for no other model, even after that model is
        gone.
        """
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._is_generating = False
        self._hook: Any = None
        if model is not None:
            self._modules.update(model.modules())

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key heads of a layer."""
        return self._arguments["attn_head_count"], self._arguments["kv_head_count"]

    def attend_by(self, kind: type[UlyssesSPAttentionHF]) -> None:
        """Use another kind of attention from now on."""
        self.attention = kind(**self._arguments)

    @property
    def is_taken(self) -> bool:
        """Whether an engine has taken the registration."""
        return self._model is not None

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` is the registered model."""
        if self._has_modules:
            return any(module in self._modules for module in model.modules())
        return _kind_of(getattr(model, "config", None)) == _kind_of(self._config)

    def serves(self, module: torch.nn.Module) -> bool:
        """Whether the attention layer ``module`` belongs to this model."""
        if self._has_modules:
            return module in self._modules
        return _kind_of(getattr(module, "config", None)) == _kind_of(self._config)

    def is_local(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether the tokens of a rank are whole sequences, as in a text that is being generated."""
        return self._is_generating or query.shape[2] != key.shape[2]

    def take(self, model: torch.nn.Module) -> None:
        """Called when an engine is made over ``model``."""
        self._model, self._has_modules = weakref.ref(model), True
        self._modules.update(model.modules())
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)
        generate = getattr(model, "generate", None)
        if callable(generate):

            @wraps(generate)
            def generate_alone(*args: Any, **kwargs: Any) -> Any:
                before, self._is_generating = self._is_generating, True
                try:
                    return generate(*args, **kwargs)
                finally:
                    self._is_generating = before

            model.__dict__["generate"] = generate_alone

    def _look(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before a forward. Raises ModelError where positions are missing, and for labels that the model would
        shift after the cut.
        """
        self.attention.has_mask_of_model = kwargs.get("attention_mask") is not None
        is_cut = not (self._is_generating or (self.attention.disable_in_eval and not model.training))
        if is_cut and kwargs.get("position_ids") is None and len(args) < 3:
            raise ModelError(
                "is given no position_ids, and would count the tokens of each rank from 0, as if documents began there",
                where=type(model).__name__,
                fix="pass position_ids [batch, tokens], the tokens' places in the whole sequence"
                " (UlyssesSPDataLoaderAdapter makes them)",
            )
        if is_cut and kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ModelError(
                "labels of a part of a sequence would be shifted within it, and one token a rank be lost",
                where=type(model).__name__,
                fix="pass shift_labels as well: labels that were shifted before the cut (UlyssesSPDataLoaderAdapter makes"
                " them)",
            )

    def close(self) -> None:
        """Restore the functions of the model, and those of transformers if no other model needs the entry."""
        model = None if self._model is None else self._model()
        if self._hook is not None:
            self._hook.remove()
        if model is not None:
            model.__dict__.pop("generate", None)
        core = self.attention.core_attn_implementation
        switch = _switches.get(core)
        if switch is not None and self in switch.registrations:
            switch.registrations.remove(self)
            if not switch.registrations:
                switch.undo()
                del _switches[core]


class _Switch:
    """An entry of transformers' table while models are registered for the entry."""

    def __init__(self, table: Any, core: str) -> None:
        self.registrations: list[Registration] = []
        self.plain = table[core]
        self._table, self._core = table, core
        table[core] = self._make()

    def _make(self) -> Callable[..., Any]:
        plain, registrations = self.plain, self.registrations

        @wraps(plain)
        def attend(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            mine = next((each for each in reversed(registrations) if each.serves(module)), None)
            if mine is None or mine.is_local(query, key):
                return plain(module, query, key, value, attention_mask, *args, **kwargs)
            return mine.attention(module, query, key, value, attention_mask, *args, **kwargs)

        return attend

    def undo(self) -> None:
        """Put the previous function back."""
        del self._table[self._core]
        if self._table.get(self._core) is not self.plain:
            self._table[self._core] = self.plain


_switches: dict[str, _Switch] = {}


def _kind_of(config: Any) -> tuple[Any, ...]:
    """Settings that tell models of different names apart by their layers."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    return tuple(getattr(text, name, None) for name in names)


def _register(
    kind: type[UlyssesSPAttentionHF],
    model_or_name: Any,
    core: str,
    group: Any,
    *,
    micro_batch_size: int = 1,
    disable_in_eval: bool = False,
) -> Registration:
    """Register a model, or raise before anything is changed."""
    table = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    model = model_or_name if isinstance(model_or_name, torch.nn.Module) else None
    if hasattr(model_or_name, "config"):
        config = model_or_name.config
    else:
        config = importlib.import_module("transformers").AutoConfig.from_pretrained(model_or_name)
    text = config.get_text_config()
    _check_layers(text, model)
    _check_core(core, getattr(config, "_attn_implementation", None), table)
    for each in [each for switch in _switches.values() for each in switch.registrations]:
        # The same registration again, before an engine has taken it, as when a notebook's cell is run twice.
        if not each.is_taken and model is not None and each.fits(model):
            each.close()
    switch = _switches.get(core)
    if switch is None:
        switch = _switches[core] = _Switch(table, core)
    n_heads = text.num_attention_heads
    arguments = {
        "attn": switch.plain,
        "batch_size": micro_batch_size,
        "attn_head_count": n_heads,
        "attn_head_size": getattr(text, "head_dim", None) or text.hidden_size // n_heads,
        "kv_head_count": getattr(text, "num_key_value_heads", None) or n_heads,
        "num_hidden_layers": text.num_hidden_layers,
        "process_group": group,
        "seq_length_is_variable": True,
        "disable_in_eval": disable_in_eval,
        "core_attn_implementation": core,
    }
    registration = Registration(kind, arguments, config, model)
    switch.registrations.append(registration)
    return registration


def _check_core(core: str, of_model: str | None, table: Any) -> None:
    kind = core.rsplit("|")[-1]
    if kind in ("eager", "flex_attention"):
        why = "takes a mask of all pairs of tokens" if kind == "eager" else "takes a mask of blocks of tokens"
        raise ConfigError(
            f"{kind} {'attention ' if kind == 'eager' else ''}{why}, which is made of a rank's own",
            where="core_attn_implementation",
            fix='load the model with attn_implementation="sdpa" or a flash attention',
        )
    if of_model is not None and of_model != core:
        raise ConfigError(
            f"is {core!r}, and the model uses {of_model!r}",
            where="core_attn_implementation",
            fix=f"write {of_model!r}, or load the model with attn_implementation={core!r}",
        )
    if core not in table and "/" in core:
        importlib.import_module("transformers.modeling_flash_attention_utils").lazy_import_flash_attention(core)
    if core not in table:
        raise ConfigError(
            f"{core!r} is no attention of transformers",
            where="core_attn_implementation",
            fix=f"use one of {', '.join(sorted(key for key in table if 'eager' not in key and 'flex' not in key))}",
        )


def _check_layers(config: Any, model: torch.nn.Module | None) -> None:
    """Raises ModelError for a model with layers that, outside attention, need more of a sequence than this rank has."""
    types = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    found = sorted({kind for kind in types if any(word in kind.lower() for word in _RECURRENT)})
    name = str(getattr(config, "model_type", "model"))
    for path, module in () if model is None else model.named_modules():
        kind = type(module).__name__
        is_named = any(word in kind.lower() for word in _RECURRENT[:-2])
        is_wide = isinstance(module, torch.nn.Conv1d) and max(module.kernel_size) > 1
        if isinstance(module, torch.nn.RNNBase) or is_named or is_wide:
            found.append(f"{path} ({kind})")
    if not found and any(word in name for word in ("mamba", "rwkv", "xlstm")):
        found = [name]
    if found:
        raise ModelError(
            f"has layers that carry a state along the sequence: {', '.join(found[:3])}; each rank would begin it anew",
            where=name,
            fix="use a model of attention layers only, or no sequence parallelism",
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "attention_chunk_size", None):
        what = "attends from one sequence to another" if config.is_encoder_decoder else "attends within chunks"
        raise ModelError(
            f"{what}, which is not cut over ranks in this version",
            where=name,
            fix="use a decoder with full or sliding-window attention, or no sequence parallelism",
        )


def registration_of(model: torch.nn.Module, group: Any) -> Registration | None:
    """Return the registration of a model over which an engine is about to be made. A model of transformers without one
    gets a new registration over ``group``, with its own attention. None for other models."""
    waiting = [each for switch in _switches.values() for each in switch.registrations if not each.is_taken]
    found = next((each for each in reversed(waiting) if each.fits(model)), None)
    core = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if found is None and isinstance(core, str):
        found = _register(UlyssesSPAttentionHF, model, core, group)
    return found
