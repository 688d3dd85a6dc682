"""The formats of a base optimizer's states: plain tensors, or codes of 8 bits with scales (``ops/q8.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.ops.q8 import BLOCK_ELEMS, SCALE_SUFFIX, scale_name
from deepspeed_c.ops.scope import declaration

__all__ = ["Codec", "codec_of"]


def codec_of(base: torch.optim.Optimizer) -> Codec:
    """The codec of the states of ``base``, which declares whether they are codes."""
    return Codec8Bit(base) if declaration(base).is_quantized else Codec(base)


def _like(param: torch.Tensor, dtype: torch.dtype, held: Any) -> torch.Tensor:
    """``held``, if it is a tensor like ``param`` of ``dtype``; else zeros."""
    fits = torch.is_tensor(held) and held.shape == param.shape and held.dtype == dtype and held.device == param.device
    return held if fits else torch.zeros_like(param, dtype=dtype)


class Codec:
    """States are tensors of their elements.

    ``param`` is always a tensor that the base optimizer sees, and ``begin`` and ``end`` count its elements."""

    gives_views = True
    """Whether ``elements`` are the memory itself, to be read and written at any time, and no copy."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base = base

    def tensor_names(self, states: Sequence[str]) -> list[str]:
        """The names of all tensors that hold states of the names ``states``."""
        return list(states)

    def named(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The entries of ``base.state[param]`` with names of their own: all but the scales of other entries."""
        yield from state.items()

    def dtype(self, held: torch.Tensor) -> torch.dtype:
        """The dtype of ``elements`` of a state that ``held`` holds."""
        return held.dtype

    def piece_elems(self, name: str, elems: int) -> int:
        """How many elements the tensor ``name`` has for ``elems`` elements of a state."""
        return elems

    def elements(self, param: torch.Tensor, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements of a state, flat."""
        return self._base.state[param][key].reshape(-1)[begin:end]

    def keep(self, param: torch.Tensor, key: str, begin: int, values: torch.Tensor) -> None:
        """Makes writes to ``elements`` count, which are ``values`` now."""

    def whole(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """All elements of a state, to be written to; ``put`` makes that count."""
        return self._base.state[param][key]

    def put(self, param: torch.Tensor, key: str, values: torch.Tensor) -> None:
        """The elements of a state are ``values``, which ``whole`` has given."""

    def make(
        self, group: int, param: torch.Tensor, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> None:
        """Makes states of the names and dtypes ``dtypes``. Tensors of ``before`` that fit are used again: new memory
        costs more than reading into it."""
        self._base.state[param].update({key: _like(param, dtype, before.get(key)) for key, dtype in dtypes.items()})

    def split(self, group: int, param: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Gives the states of ``param`` to its ``pieces`` (tensor, first element): views of the tensors, copies of the
        counts."""
        state = self._base.state.pop(param, {})
        for piece, first in pieces:
            for key, value in state.items():
                if not torch.is_tensor(value):
                    self._base.state[piece][key] = value
                elif value.dim() == 1 and value.numel() == param.numel():
                    self._base.state[piece][key] = value.narrow(0, first, piece.numel()).view(piece.shape)
                else:
                    self._base.state[piece][key] = value.clone()


class Codec8Bit(Codec):
    """States are codes of 8 bits with a scale a block. Their elements are copies in fp32."""

    gives_views = False

    def tensor_names(self, states: Sequence[str]) -> list[str]:
        return [*states, *map(scale_name, states)]

    def named(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return ((key, value) for key, value in state.items() if not key.endswith(SCALE_SUFFIX))

    def dtype(self, held: torch.Tensor) -> torch.dtype:
        return torch.float32

    def piece_elems(self, name: str, elems: int) -> int:
        return elems // BLOCK_ELEMS if name.endswith(SCALE_SUFFIX) else elems

    def elements(self, param: torch.Tensor, key: str, begin: int, end: int) -> torch.Tensor:
        return self._base.dequantized_state(param, key, begin, end)

    def keep(self, param: torch.Tensor, key: str, begin: int, values: torch.Tensor) -> None:
        whole = self.whole(param, key)
        whole.view(-1)[begin : begin + values.numel()].copy_(values)
        self.put(param, key, whole)

    def whole(self, param: torch.Tensor, key: str) -> torch.Tensor:
        return self._base.dequantized_state(param, key)

    def put(self, param: torch.Tensor, key: str, values: torch.Tensor) -> None:
        self._base.quantize_state_(param, key, values)

    def make(
        self, group: int, param: torch.Tensor, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> None:
        self._base.init_state(group, param)

    def split(self, group: int, param: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, int]]) -> None:
        base, state = self._base, self._base.state.get(param, {})
        for piece, first in pieces if state else ():
            if "step" in state:
                base.state[piece]["step"] = state["step"].clone()
            base.init_state(group, piece)
            for key in base.names_of_states(group):
                # Blocks of codes are counted from each tensor's beginning: these are new ones.
                base.quantize_state_(piece, key, base.dequantized_state(param, key, first, first + piece.numel()))
        base.state.pop(param, None)
