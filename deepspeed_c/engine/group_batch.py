"""One batch of the prompts of several ranks: how the calls of ``generate`` on the ranks of a group become one call, and
which part of its result belongs to whom.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deepspeed_c.engine.prompts import are_tokens, find_tokens, prompts_of, setting_of
from deepspeed_c.errors import FeatureError, RankMismatchError, StateError

__all__ = ["GroupBatch", "Request", "request_of"]

_WHERE = "generate with hybrid_engine.inference_tp_size"
# Arguments that each rank may choose for itself, because they concern its own prompts.
_OWN = (
    "inputs",
    "input_ids",
    "attention_mask",
    "synced_gpus",
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
)


class Request(NamedTuple):
    """One rank's call of ``generate``, as it is sent to the other ranks."""

    prompts: torch.Tensor
    """[batch, tokens], integers in host memory."""
    is_token: torch.Tensor
    """bool [batch, tokens]: False where there is padding."""
    most: int | None
    """The number of new tokens at which this rank's rows end. None: the default of transformers."""
    least: int
    """The number of new tokens before which no row ends."""
    settings: dict[str, Any]
    """The other arguments, as plain values. They have to be the same on all ranks."""


def request_of(
    model: torch.nn.Module, generate: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Request, dict[str, Any]]:
    """The request of a call ``generate(*args, **kwargs)``, and the arguments of the call that all ranks share.

    Raises FeatureError for arguments that concern single rows or return more than tokens, StateError where there is no
    room for a new token.
    """
    kwargs = dict(kwargs)
    names = [p.name for p in inspect.signature(generate).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for place, value in enumerate(args[1:], 1):
        if place >= len(names):
            raise FeatureError("more than one argument has no name", where=_WHERE, fix="pass arguments by name")
        kwargs[names[place]] = value
    prompts = prompts_of(args, kwargs)
    if not are_tokens(prompts):
        got = f"a tensor of shape {tuple(prompts.shape)}" if torch.is_tensor(prompts) else type(prompts).__name__
        raise FeatureError(
            f"prompts must be token numbers [batch, tokens], not {got}",
            where=_WHERE,
            fix="set hybrid_engine.inference_tp_size to 1",
        )
    shared = {name: value for name, value in kwargs.items() if name not in _OWN}
    for name, value in shared.items():
        if not _is_plain(value):
            raise FeatureError(
                f"the argument {name} ({type(value).__name__}) would meet the prompts of other ranks",
                where=_WHERE,
                fix="leave it out, or set hybrid_engine.inference_tp_size to 1",
            )
    if setting_of(model, kwargs, "return_dict_in_generate"):
        raise FeatureError(
            "return_dict_in_generate asks for more than tokens",
            where=_WHERE,
            fix="leave it out, or set hybrid_engine.inference_tp_size to 1",
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and (not torch.is_tensor(mask) or mask.shape != prompts.shape):
        raise FeatureError(
            f"attention_mask has the shape {tuple(getattr(mask, 'shape', ()))}, the prompts {tuple(prompts.shape)}",
            where=_WHERE,
            fix="pass a mask [batch, tokens]",
        )
    n_rows, n_tokens = prompts.shape
    most = setting_of(model, kwargs, "max_new_tokens")
    if most is None and (total := setting_of(model, kwargs, "max_length")) is not None:
        most = total - n_tokens
    if n_rows and most is not None and most < 1:
        raise StateError(
            f"a prompt of {n_tokens} tokens leaves no room for a new one",
            where=_WHERE,
            fix="raise max_length, or pass max_new_tokens",
        )
    least = setting_of(model, kwargs, "min_new_tokens")
    if least is None:
        least = max((setting_of(model, kwargs, "min_length") or 0) - n_tokens, 0)
    is_token = find_tokens(model, args, kwargs)
    plain = {name: _text(value) for name, value in shared.items()}
    plain["the model's generation_config"] = _text(getattr(model, "generation_config", None))
    return Request(prompts.cpu(), is_token.cpu(), most, least, plain), shared


class GroupBatch:
    """The requests of all ranks as one call."""

    def __init__(self, model: torch.nn.Module, requests: Sequence[Request], rank: int, shared: dict[str, Any]) -> None:
        """rank: this rank's place among ``requests``. shared: arguments that are the same on all ranks.

        Raises RankMismatchError, on all ranks alike, where the requests cannot be one call.
        """
        self._requests, self._rank = requests, rank
        asking = [request for request in requests if len(request.prompts)]
        self.n_rows = sum(len(request.prompts) for request in requests)
        self._width = max((request.prompts.shape[1] for request in asking), default=0)
        self._n_sequences = setting_of(model, shared, "num_return_sequences") or 1
        ends = setting_of(model, shared, "eos_token_id")
        self._ends = [] if ends is None else [ends] if isinstance(ends, int) else [int(end) for end in ends]
        self._pad = setting_of(model, shared, "pad_token_id") or 0
        self.kwargs = dict(shared)
        if asking:
            _compare(requests)
            self._set_lengths(asking)

    def _set_lengths(self, asking: Sequence[Request]) -> None:
        limits = [request.most for request in asking]
        if None in limits and any(most is not None for most in limits):
            raise _mismatch("some ranks say how many tokens they want, others do not", "pass max_new_tokens on each")
        least = max(request.least for request in asking)
        # A row that ends before it may end at all has the same tokens with a larger minimum.
        if any(request.least != least and not (request.most or 0) <= request.least for request in asking):
            raise _mismatch(
                f"rows may end after {sorted({request.least for request in asking})} new tokens",
                "pass the same min_new_tokens on each",
            )
        if None not in limits:
            self.kwargs["max_new_tokens"] = max(limits)
        if least:
            self.kwargs["min_new_tokens"] = least

    def prompts(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts and attention mask of all ranks, [rows, tokens], padded on the left."""
        rows, masks = [], []
        for request in self._requests:
            if len(request.prompts):
                room = (self._width - request.prompts.shape[1], 0)
                rows.append(F.pad(request.prompts, room, value=self._pad))
                masks.append(F.pad(request.is_token.long(), room))
        return torch.cat(rows).to(device), torch.cat(masks).to(device)

    def own_part(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``tokens`` [rows, tokens], without the padding that its prompts got here, and with the
        length at which its own rows would have ended."""
        request = self._requests[self._rank]
        before = sum(len(other.prompts) for other in self._requests[: self._rank])
        n_rows, n_tokens = request.prompts.shape
        rows = tokens[before * self._n_sequences : (before + n_rows) * self._n_sequences, self._width - n_tokens :]
        if request.most is not None:
            rows = rows[:, : n_tokens + request.most]
        made = rows[:, n_tokens:]
        if self._ends and made.shape[1]:
            is_end = torch.isin(made, torch.tensor(self._ends, device=made.device))
            lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, made.shape[1])
            rows = rows[:, : n_tokens + int(lengths.max())]
        return rows.contiguous()


def _compare(requests: Sequence[Request]) -> None:
    first = requests[0].settings
    for rank, request in enumerate(requests):
        for name in sorted({*first, *request.settings}):
            values = [side.get(name, "absent") for side in (first, request.settings)]
            if values[0] != values[1]:
                raise _mismatch(
                    f"{name} is {values[0]} on rank 0 of the group and {values[1]} on rank {rank}", "pass the same"
                )


def _mismatch(what: str, fix: str) -> RankMismatchError:
    return RankMismatchError(what, where=_WHERE, fix=f"{fix}: the ranks of a group generate in one batch")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str)) or _is_settings(value)


def _is_settings(value: Any) -> bool:
    return callable(getattr(value, "to_diff_dict", None))


def _text(value: Any) -> str:
    """The value as text. Lengths in a ``GenerationConfig`` are left out: each rank may have its own."""
    if not _is_settings(value):
        return repr(value)
    return repr(sorted((k, repr(v)) for k, v in value.to_diff_dict().items() if k not in _OWN))
