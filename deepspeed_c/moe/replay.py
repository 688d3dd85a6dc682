"""Routing replay: the experts of one run, chosen again in another one.

A policy that is trained on its rollouts computes each token with the experts that the rollout had used, although the
router's numbers differ by rounding between the two. The router at hand still computes the weights: only its ``topk``
gets the given indices, so gradients reach the router as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.moe.adapters import outermost
from deepspeed_c.moe.auto import RoutedExperts

__all__ = ["record_routing", "replay_routing"]


def _layers(model: nn.Module, where: str) -> dict[str, RoutedExperts]:
    found = {module.name: module for module in model.modules() if isinstance(module, RoutedExperts)}
    if not found:
        raise StateError(
            "the model has no layer whose experts expert_parallel has spread over ranks",
            where=where,
            fix='pass engine.module of an engine with "expert_parallel": {"enabled": true}; autoep_size may be 1',
        )
    return found


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Within the context, yields a dict that fills: name of the experts -> chosen experts of each forward, int32
    [tokens, k]. Raises StateError for a model without layers of ``expert_parallel``."""
    recorded: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        for name, layer in _layers(model, "record_routing").items():
            found = recorded.setdefault(name, [])

            def note(module: RoutedExperts, args: Any, output: Any, found: list[Tensor] = found) -> None:
                found.append(module.last_indices)

            stack.callback(layer.register_forward_hook(note).remove)
        yield recorded


@contextmanager
def replay_routing(model: nn.Module, indices: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context, routers choose ``indices``, by name of the experts: int [tokens, k], for each forward of the
    layer. Layers that are not named choose by themselves. Layers that run again in a backward need the context there.

    Raises StateError for names that the model does not have; ModelError for indices of another shape or range, and for
    a router that does not choose by ``torch.topk``.
    """
    layers = _layers(model, "replay_routing")
    if unknown := sorted(indices.keys() - layers.keys()):
        raise StateError(
            f"the model has no experts {', '.join(unknown[:3])}",
            where="replay_routing",
            fix=f"use the names of record_routing: {', '.join(list(layers)[:3])}",
        )
    with ExitStack() as stack:
        for name, given in indices.items():
            layer = layers[name]
            if given.dim() != 2 or given.is_floating_point() or not _is_within(given, layer.n_experts):
                raise ModelError(
                    f"indices are {tuple(given.shape)} {given.dtype}; integers [tokens, k] from 0 to"
                    f" {layer.n_experts - 1} are expected",
                    where=name,
                    fix="pass what record_routing recorded of one forward",
                )
            stack.callback(_Replay(layer, given.long()).attach(_block_of(model, layer)))
        yield


def _is_within(indices: Tensor, n_experts: int) -> bool:
    return indices.numel() == 0 or bool((indices.min() >= 0) & (indices.max() < n_experts))


def _block_of(model: nn.Module, layer: nn.Module) -> nn.Module:
    """The module that calls router and experts: the closest one around ``layer`` that is no adapter."""
    named = dict(model.named_modules())
    path = next(name for name, module in named.items() if module is layer)
    return named[outermost(path, named).rpartition(".")[0]]


class _Replay(TorchFunctionMode):
    """Gives ``topk`` the indices of one layer, while the layer's block runs."""

    def __init__(self, layer: RoutedExperts, indices: Tensor) -> None:
        super().__init__()
        self._layer, self._indices, self._n_choices = layer, indices, 0

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, Tensor.topk) and self._is_choice(*args, **kwargs):
            scores = args[0] if args else kwargs["input"]
            self._n_choices += 1
            chosen = self._indices.to(scores.device)
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        return function(*args, **kwargs)

    def _is_choice(self, input: Tensor, k: int | None = None, *args: Any, **more: Any) -> bool:
        """Whether this ``topk`` chooses the experts of tokens; others choose groups of experts."""
        if input.dim() != 2 or input.shape[-1] != self._layer.n_experts or k != self._indices.shape[1]:
            return False
        if input.shape[0] != self._indices.shape[0]:
            raise ModelError(
                f"the forward has {input.shape[0]} tokens, and indices of {self._indices.shape[0]} were given",
                where=self._layer.name,
                fix="pass the indices of the same tokens",
            )
        return True

    def attach(self, block: nn.Module) -> Callable[[], None]:
        """Acts within the forwards of ``block``. Returns the function that ends it."""

        def begin(module: nn.Module, args: Any) -> None:
            self._n_choices = 0
            self.__enter__()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self.__exit__(None, None, None)

        def check(module: nn.Module, args: Any, output: Any) -> None:
            if self._n_choices != 1:
                raise ModelError(
                    f"its router called torch.topk {self._n_choices} times for the experts of a token",
                    where=self._layer.name,
                    fix="leave this layer out of the replay",
                )

        hooks = (
            block.register_forward_pre_hook(begin),
            block.register_forward_hook(end, always_call=True),
            block.register_forward_hook(check),
        )

        def detach() -> None:
            for hook in hooks:
                hook.remove()

        return detach
