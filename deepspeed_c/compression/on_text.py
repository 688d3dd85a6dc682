"""The loss on a text and the time of a forward of a causal language model: the price and the gain of compression."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.inject.folder import tokenizer_of, transformers_for

__all__ = ["OnText", "check_causal", "on_text", "windows_of"]

_FLAG = "--text"
MAX_WINDOWS = 64
"""A text of more windows is read in part: at so many places, evenly spread."""
_TIMED = 7


@dataclass(frozen=True, kw_only=True)
class OnText:
    """One model on one text."""

    loss: float
    """Mean cross entropy in nats per token."""
    milliseconds: float
    """Median time of the forward of one window."""


def check_causal(model: nn.Module, command: str) -> None:
    """Raises ModelError for a model of transformers that is no causal language model: its loss means something else."""
    names = transformers_for(command).models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if type(model).__name__ not in names.values():
        raise ModelError(
            f"{type(model).__name__} is no causal language model", where=_FLAG, fix=f"leave {_FLAG} out for this model"
        )


def windows_of(folder: Path, file: str, context: int, model: nn.Module, command: str) -> list[torch.Tensor]:
    """Windows of the text ``file`` as int64 [1, at most context], by the tokenizer of the model's ``folder``: the whole
    text, or ``MAX_WINDOWS`` of its windows.

    Raises ConfigError for a file that cannot be read as UTF-8, fewer than two tokens, tokens that the model does not
    have, a context beyond its positions, and a folder without a tokenizer.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if context < 2 or (positions is not None and context > positions):
        most = "" if positions is None else f" to {positions}"
        raise ConfigError(f"{context} tokens are no window", where="--context", fix=f"write a number from 2{most}")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=file, fix=f"name a text in UTF-8 with {_FLAG}") from error
    ids = _ids_of(tokenizer_of(folder, command, f"or leave {_FLAG} out"), text)
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} token(s)", where=file, fix="name a longer text")
    n_known = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= n_known:
        raise ConfigError(
            f"the tokenizer gives token {int(ids.max())}, and the model has {n_known}",
            where=str(folder),
            fix="save the tokenizer that the model was trained with in its folder",
        )
    # The last token of a window is the first of the next: each token but the first of the text is predicted once.
    windows = [ids[None, first : first + context] for first in range(0, len(ids) - 1, context - 1)]
    n_read = min(len(windows), MAX_WINDOWS)
    return [windows[i * len(windows) // n_read] for i in range(n_read)]


def _ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)


@torch.no_grad()
def on_text(model: nn.Module, windows: Sequence[torch.Tensor]) -> OnText:
    """The figures of ``model``, which is on the CPU and in evaluation mode. ``windows`` as of ``windows_of``; the first
    one is timed. Raises ModelError where the forward fails, as with layers that no longer fit one another.
    """
    try:
        return _on_text(model, windows)
    except Exception as error:  # the model's own code may raise anything
        raise ModelError(
            f"the model cannot compute this text: {error}",
            where=type(model).__name__,
            fix="if layers got smaller, name with related_modules all layers that have to fit them",
        ) from error


def _on_text(model: nn.Module, windows: Sequence[torch.Tensor]) -> OnText:
    total, n_tokens = 0.0, 0
    for window in windows:
        logits = model(input_ids=window).logits[0, :-1].float()
        total += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        n_tokens += window.shape[1] - 1
    seconds = []
    for _ in range(_TIMED):
        begin = time.perf_counter()
        model(input_ids=windows[0])
        seconds.append(time.perf_counter() - begin)
    return OnText(loss=total / n_tokens, milliseconds=statistics.median(seconds) * 1e3)
