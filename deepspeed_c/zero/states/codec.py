"""The formats of a base optimizer's states: plain tensors, or 8-bit codes with scales (``ops/q8.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.ops.q8 import BLOCK_ELEMS, SCALE_SUFFIX, scale_name
from deepspeed_c.ops.scope import declaration

__all__ = ["Codec", "codec_of"]


def codec_of(base: torch.optim.Optimizer) -> Codec:
    """The codec for the states of ``base``. The optimizer's declaration says whether they are 8-bit codes."""
    return Codec8Bit(base) if declaration(base).is_quantized else Codec(base)


def _like(param: torch.Tensor, dtype: torch.dtype, held: Any) -> torch.Tensor:
    """Returns ``held`` if it is a tensor of ``dtype`` with the shape and device of ``param``; otherwise zeros."""
    fits = torch.is_tensor(held) and held.shape == param.shape and held.dtype == dtype and held.device == param.device
    return held if fits else torch.zeros_like(param, dtype=dtype)


class Codec:
    """The codec of states that are plain tensors.

    In all methods ``param`` is a parameter of the base optimizer, and ``begin`` and ``end`` are indices of its
    elements."""

    gives_views = True
    """Whether ``elements`` returns a view of the state's memory and not a copy."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base = base

    def tensor_names(self, states: Sequence[str]) -> list[str]:
        """The names of all tensors that hold states of the names ``states``."""
        return list(states)

    def named(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The entries of ``base.state[param]`` without scales, which belong to other entries."""
        yield from state.items()

    def dtype(self, held: torch.Tensor) -> torch.dtype:
        """The dtype that ``elements`` returns for a state that is stored in ``held``."""
        return held.dtype

    def piece_elems(self, name: str, elems: int) -> int:
        """The number of elements that the tensor ``name`` has for ``elems`` elements of a state."""
        return elems

    def elements(self, param: torch.Tensor, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements ``begin`` to ``end`` of a state, flat."""
        return self._base.state[param][key].reshape(-1)[begin:end]

    def keep(self, param: torch.Tensor, key: str, begin: int, values: torch.Tensor) -> None:
        """Stores ``values``, a result of ``elements`` that the caller has edited."""

    def whole(self, param: torch.Tensor, key: str) -> torch.Tensor:
        """All elements of a state. The caller may write to them and then stores them with ``put``."""
        return self._base.state[param][key]

    def put(self, param: torch.Tensor, key: str, values: torch.Tensor) -> None:
        """Stores ``values``, a result of ``whole`` that the caller has edited."""

    def make(
        self, group: int, param: torch.Tensor, dtypes: Mapping[str, torch.dtype], before: Mapping[str, Any]
    ) -> None:
        """Makes states with the names and dtypes in ``dtypes``. Tensors of ``before`` are used again if they fit,
        because allocating memory costs more than filling it."""
        self._base.state[param].update({key: _like(param, dtype, before.get(key)) for key, dtype in dtypes.items()})

    def split(self, group: int, param: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Moves the states of ``param`` to its ``pieces`` (tensor, first element). A piece gets views of state tensors
        and copies of counts."""
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
    """The codec of states that are 8-bit codes with one scale per block. ``elements`` returns copies in fp32."""

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
                # Blocks begin at the start of each tensor, so a piece has other blocks than ``param`` and is quantized
                # again.
                base.quantize_state_(piece, key, base.dequantized_state(param, key, first, first + piece.numel()))
        base.state.pop(param, None)
