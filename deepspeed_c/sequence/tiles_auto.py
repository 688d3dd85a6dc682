"""Runs the MLPs and the loss of a model in tiles, without a change in its code: ``"sequence_parallel": {"tiles":
"auto"}``.

MLPs are found by the name of their class and by their contents: all their layers treat each token by itself.
Transformers' causal models compute their loss in tiles when they train with labels. Then the layer for the logits
returns a placeholder, and the loss takes the layer's input instead. Any other use of the placeholder computes the
logits. Where tensor-parallel ranks hold the model together, each rank computes its columns of the logits. MLPs run
whole there, because their layers call collectives.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.inject.loss import CutCausalLoss
from deepspeed_c.inject.swap import swap_forward, swap_loss
from deepspeed_c.logging import logger
from deepspeed_c.sequence.loss import tiled_cross_entropy
from deepspeed_c.sequence.tiles import IGNORED, TiledMLP

__all__ = ["PromisedLogits", "TiledModel", "tile_model", "tiles_of_loss", "tiles_of_mlp"]

LOGITS_ELEMS = 1 << 24
"""Limit on the elements of a tile's logits: 64 MiB in float32."""

_NAMES = ("MLP", "FeedForward", "FFN")
_LAYERS = ("Linear", "Conv1D")  # transformers' Conv1D is a linear layer whose weight is transposed
_CONTAINERS = (torch.nn.ModuleDict, torch.nn.ModuleList, torch.nn.ParameterDict, torch.nn.ParameterList)
_OF_ONE_TOKEN = ("Norm", "Dropout", "Identity")


def tiles_of_mlp(n_tokens: int, width: int) -> int:
    """Number of tiles with which a tile has at least as many tokens as the model is wide. Then products stay square,
    and activations between the layers take as much memory as a weight.
    """
    return max(1, math.ceil(n_tokens / max(1, width)))


def tiles_of_loss(n_tokens: int, vocab_size: int) -> int:
    """Number of tiles with which a tile's logits have at most ``LOGITS_ELEMS`` elements."""
    return max(1, math.ceil(n_tokens * vocab_size / LOGITS_ELEMS))


def tile_model(model: torch.nn.Module, n_tensor_ranks: int = 1) -> TiledModel:
    """Let ``model`` run its MLPs, and its loss, in tiles until ``close`` is called on the result.
    n_tensor_ranks: tensor-parallel ranks that hold the model together; with several of them, only its loss runs in
    tiles.

    Raises ModelError where the model has neither MLPs nor such a loss. If several ranks hold the model together, also
    raises it where the loss is not cut over them.
    """
    tiled = TiledModel(model, has_mlps=n_tensor_ranks == 1)
    if n_tensor_ranks > 1 and not tiled.has_loss:
        tiled.close()
        raise ModelError(
            f"{type(model).__name__} is cut over {n_tensor_ranks} tensor-parallel ranks, which can share a causal loss of"
            " transformers' alone, and it has none, or one whose logits no rank has a part of",
            where='"sequence_parallel": {"tiles": "auto"}',
            fix="leave tiles out, or tensor parallelism (tensor_parallel.autotp_size)",
        )
    if tiled.n_mlps == 0 and not tiled.has_loss:
        tiled.close()
        raise ModelError(
            f"{type(model).__name__} has no MLP (a module whose class is called ...{', ...'.join(_NAMES)})"
            " and no causal loss of transformers'",
            where='"sequence_parallel": {"tiles": "auto"}',
            fix="call TiledMLP and TiledFusedLogitsLoss in the model, or leave tiles out",
        )
    logger.info("%d MLPs%s run in tiles of the sequence", tiled.n_mlps, " and the loss" if tiled.has_loss else "")
    return tiled


class TiledModel:
    """The changes to one model, and a way to undo them."""

    def __init__(self, model: torch.nn.Module, *, has_mlps: bool = True) -> None:
        self._undo: list[Callable[[], None]] = []
        self.n_mlps = 0
        for module in model.modules() if has_mlps else ():
            if _is_mlp(module):
                self._replace_forward(module, functools.partial(_forward_in_tiles, module, module.forward))
                self.n_mlps += 1
        causal = _causal_model(model, is_cut=not has_mlps)
        self.has_loss = causal is not None
        if causal is not None:
            self._tile_loss(causal, causal.get_output_embeddings())

    def _replace_forward(self, module: torch.nn.Module, forward: Callable) -> None:
        wrapped = functools.wraps(module.forward)(functools.partial(forward))
        self._undo.append(swap_forward(module, wrapped))

    def _tile_loss(self, model: torch.nn.Module, head: torch.nn.Module) -> None:
        usual = model.loss_function
        loss = _TiledCausalLoss(head, usual)
        if isinstance(usual, CutCausalLoss):
            usual.compute_in_tiles(True)
            self._undo.append(functools.partial(usual.compute_in_tiles, False))
        self._undo.append(swap_loss(model, loss))
        self._replace_forward(head, loss.head_forward)
        self._undo.append(model.register_forward_pre_hook(loss.before, with_kwargs=True).remove)
        self._undo.append(model.register_forward_hook(loss.after, always_call=True).remove)

    def close(self) -> None:
        """Restores the model."""
        while self._undo:
            self._undo.pop()()


def _is_mlp(module: torch.nn.Module) -> bool:
    """Whether ``module`` has an MLP's name, takes one tensor, and has only layers that treat every token by itself."""
    if not type(module).__name__.endswith(_NAMES):
        return False
    leaves = [each for each in module.modules() if not isinstance(each, _CONTAINERS) and not any(each.children())]
    if not any(type(leaf).__name__.endswith(_LAYERS) for leaf in leaves):
        return False
    for leaf in leaves:
        name = type(leaf).__name__
        has_state = any(True for _ in (*leaf.parameters(), *leaf.buffers()))
        if has_state and not name.endswith((*_LAYERS, "Norm")) or "BatchNorm" in name:
            return False
        # A layer without weights and state counts as an activation if the path of its Python module says so.
        is_activation = ".activation" in type(leaf).__module__ or ".activations" in type(leaf).__module__
        if not has_state and not is_activation and not any(word in name for word in (*_LAYERS, *_OF_ONE_TOKEN)):
            return False
    return True


def _takes_one_tensor(args: tuple, kwargs: dict[str, Any]) -> bool:
    return len(args) + len(kwargs) == 1


def _forward_in_tiles(module: torch.nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    x = next(iter((*args, *kwargs.values())), None)
    if not _takes_one_tensor(args, kwargs) or not torch.is_tensor(x) or x.dim() < 2:
        return forward(*args, **kwargs)
    n_tiles = min(tiles_of_mlp(x.numel() // max(1, x.shape[-1]), x.shape[-1]), x.shape[-2])
    if n_tiles <= 1:
        return forward(*args, **kwargs)
    return TiledMLP.apply(lambda _, tile: forward(tile), module, x, n_tiles, None)


def _causal_model(model: torch.nn.Module, *, is_cut: bool) -> torch.nn.Module | None:
    """The module that computes transformers' causal loss on the logits of one of its own layers. is_cut: whether its
    vocabulary is cut over ranks.
    """
    for module in model.modules():
        # The class is asked, because peft's wrappers pass attributes of their models on.
        if not all(hasattr(type(module), name) for name in ("get_output_embeddings", "loss_function")):
            continue
        is_causal = getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss" and not is_cut
        if isinstance(module.loss_function, CutCausalLoss):
            is_causal = module.get_output_embeddings() is module.loss_function.head
        if is_causal and module.get_output_embeddings() is not None:
            return module
    return None


class _TiledCausalLoss:
    """Stands in for transformers' ``ForCausalLMLoss`` on one model."""

    def __init__(self, head: torch.nn.Module, usual: Callable) -> None:
        self._head, self._usual = head, usual
        self._project = head.forward
        self._cut = usual if isinstance(usual, CutCausalLoss) else None
        self._n_words = getattr(head, "out_features", None) or head.weight.shape[0]
        if self._cut is not None:
            self._n_words = sum(self._cut.sizes)
        self._is_armed = False

    def before(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before the forward. A model that trains with labels does not compute its logits."""
        given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        has_labels = any(given.get(name, kwargs.get(name)) is not None for name in ("labels", "shift_labels"))
        self._is_armed = model.training and has_labels and torch.is_grad_enabled()

    def after(self, *_: Any) -> None:
        self._is_armed = False

    def head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return PromisedLogits.of(hidden, self._project, self._n_words) if self._is_armed else self._project(hidden)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """labels [..., tokens]: the logits of token t predict label t + 1. shift_labels: the logits of token t predict
        label t.
        """
        if type(logits) is not PromisedLogits or logits.is_computed:
            return self._usual(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = logits.hidden
        return tiled_cross_entropy(
            self._project if self._cut is None else self._cut.columns,
            hidden,
            shift_labels.to(hidden.device),
            tiles_of_loss(hidden.numel() // max(1, hidden.shape[-1]), vocab_size),
            weights=list(self._head.parameters()),
            ignore_index=ignore_index,
            n_counted=num_items_in_batch,
            is_spent=type(self._head) is torch.nn.Linear,
            losses=None if self._cut is None else self._cut.losses,
        )


class PromisedLogits(torch.Tensor):
    """Logits [..., vocab_size] that are not computed yet. Any use computes them, except a look at shape, dtype or
    device.
    """

    # ``of`` sets these attributes on each instance, because a tensor's constructor takes no such arguments.
    hidden: torch.Tensor
    project: Callable[[torch.Tensor], torch.Tensor]
    computed: torch.Tensor | None

    @classmethod
    def of(
        cls, hidden: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
    ) -> PromisedLogits:
        """Placeholder for ``project(hidden)``: logits of a vocabulary of ``vocab_size``."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], vocab_size), dtype=hidden.dtype, device=hidden.device
        )
        made.hidden, made.project, made.computed = hidden, project, None
        return made

    @property
    def is_computed(self) -> bool:
        return self.__dict__["computed"] is not None

    def whole(self) -> torch.Tensor:
        """The computed logits, in the graph."""
        own = self.__dict__
        if own["computed"] is None:
            own["computed"] = own["project"](own["hidden"])
        return own["computed"]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found, named = torch.utils._pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*found, **named)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, named = torch.utils._pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*found, **named)


_LOOKS = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.layout.__get__,
    torch.Tensor.is_cuda.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.grad_fn.__get__,
    torch.Tensor.is_leaf.__get__,
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
}
