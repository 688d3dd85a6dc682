"""The experts of each token of a rollout, for models whose experts ``expert_parallel`` has spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from deepspeed_c.moe.auto import RoutedExperts
from deepspeed_c.moe.replay import record_routing

__all__ = ["RolloutRoutes"]


class RolloutRoutes:
    """Collects routes within ``recording``. Rows are named by numbers: samples from 0, and then prompts.

    n_samples: of all prompts. n_ways: of each prompt.
    """

    def __init__(self, n_samples: int, n_ways: int) -> None:
        self._n_samples, self._n_ways = n_samples, n_ways
        self._recorded: dict[str, list[torch.Tensor]] = {}
        self._rows: dict[str, dict[int, list[torch.Tensor]]] = {}

    @contextmanager
    def recording(self, model: torch.nn.Module) -> Iterator[None]:
        """Context of the forwards. A model without such experts has no routes."""
        if not any(isinstance(module, RoutedExperts) for module in model.modules()):
            yield
            return
        with record_routing(model) as self._recorded:
            self._rows = {name: {} for name in self._recorded}
            yield

    def note(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Takes the routes of the last forward. It had ``lengths`` new tokens of each row, behind one another."""
        for name, forwards in self._recorded.items():
            for row, piece in zip(rows, forwards[-1].cpu().split(list(lengths)), strict=True):
                self._rows[name].setdefault(row, []).append(piece)
            forwards.clear()

    def note_batches(self, n_columns: int) -> None:
        """Takes the routes of all forwards of ``generate``. The first ones have ``n_columns`` tokens of each prompt,
        padding too, perhaps once for all samples of a prompt; each further one has a token of each sample."""
        n_prompts = self._n_samples // self._n_ways
        for name, forwards in self._recorded.items():
            pieces, n_seen = self._rows[name], 0
            for indices in forwards:
                n_expected = self._n_samples * (n_columns - n_seen if n_seen < n_columns else 1)
                n_ways = 1 if len(indices) == n_expected else self._n_ways
                n_rows = self._n_samples if n_ways == 1 else n_prompts
                by_row = indices.cpu().view(n_rows, -1, indices.shape[-1]).repeat_interleave(n_ways, 0)
                for row in range(self._n_samples):
                    pieces.setdefault(row, []).append(by_row[row])
                n_seen += by_row.shape[1]
            forwards.clear()

    def joined(self, is_token: torch.Tensor, n_prompt: int) -> dict[str, torch.Tensor] | None:
        """Name of the experts -> int32 [samples, places, k]; None for a model without routes.

        is_token: mask of the batch. n_prompt: places of prompts."""
        if not self._rows:
            return None
        return {name: self._join(rows, is_token.cpu() != 0, n_prompt) for name, rows in self._rows.items()}

    def _join(self, rows: dict[int, list[torch.Tensor]], is_token: torch.Tensor, n_prompt: int) -> torch.Tensor:
        k = next(iter(rows.values()))[0].shape[-1] if rows else 1
        found = torch.arange(k, dtype=torch.int32).expand(*is_token.shape, k).clone()
        for row, mask in enumerate(is_token):
            prompt = rows.get(self._n_samples + row // self._n_ways, [])
            pieces = torch.cat([*prompt, *rows.get(row, [])]).int()
            if prompt:  # tokens alone; the last one of a response was not read
                found[row][mask.nonzero()[:-1, 0]] = pieces
            else:
                n = n_prompt + int(mask[n_prompt:].sum()) - 1
                found[row, :n] = torch.where(mask[:n, None], pieces[:n], found[row, :n])
        return found
