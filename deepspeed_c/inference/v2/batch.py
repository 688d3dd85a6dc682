"""The new tokens of one forward of the ragged engine, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c import _C
from deepspeed_c.config.ragged import DSStateManagerConfig
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inference.v2.scheduling import SchedulingError, SchedulingResult

__all__ = ["RaggedBatchWrapper", "to_padded"]

_ANY_WORD = (1 << 63) - 1
_PADDING = -1


def to_padded(original_size: int) -> int:
    """The number of tokens of a padded batch: the next multiple of 64, of 128 for more than 512."""
    granularity = 64 if original_size <= 512 else 128
    return -(-original_size // granularity) * granularity


class RaggedBatchWrapper:
    """New tokens of sequences, behind one another. The engine fills one for each ``put``.

    Args:
        config: its limits of tokens and sequences.
        n_words: tokens are words of a vocabulary of this size; None: any number that is not negative.

    ``insert_sequence`` adds sequences, ``finalize`` puts their numbers together (``csrc/infer/batch.c``), ``clear``
    begins anew. The tensors lie in host memory and belong to the caller: a later batch does not write to them.
    ``on_device`` is DeepSpeed's and has no effect. Tensors before ``finalize`` are a StateError.
    """

    def __init__(self, config: DSStateManagerConfig, n_words: int | None = None) -> None:
        self._config, self._n_words = config, _ANY_WORD if n_words is None else n_words
        self.clear()

    def clear(self) -> None:
        """Takes all sequences out."""
        self._sequences: list[Any] = []
        self._tokens: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._n_tokens = 0
        self._ids: torch.Tensor | None = None
        self._places: _C.KvBatch | None = None
        self._is_padded = False

    def insert_sequence(self, seq_descriptor: Any, tokens: torch.Tensor, do_checks: bool = True) -> None:
        """Adds new ``tokens`` (integers [tokens]) of a sequence.

        seq_descriptor: has ``seen_tokens``. Raises ModelError for other tensors and, with ``do_checks``,
        SchedulingError for more sequences or tokens than the configuration allows; nothing is changed then.
        """
        n_tokens = tokens.numel()
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise ModelError(
                f"the tokens are {tuple(tokens.shape)} {tokens.dtype}; integers [tokens] are expected",
                where="RaggedBatchWrapper.insert_sequence",
                fix="pass a vector of token ids",
            )
        if do_checks:
            self._require_room(n_tokens)
        self._sequences.append(seq_descriptor)
        self._tokens.append(tokens)
        self._lengths.append(n_tokens)
        self._n_tokens += n_tokens
        self._ids = self._places = None

    def finalize(self, padding: bool | None = False) -> None:
        """Puts the tensors together. padding: ``input_ids`` and ``tokens_to_seq`` get -1 behind the last token, up to
        ``to_padded``.

        Raises ModelError for a token that is no word.
        """
        ids = torch.cat(self._tokens) if self._tokens else torch.empty(0)
        ids = ids.to("cpu", torch.int64)
        places = _C.KvBatch([each.seen_tokens for each in self._sequences], self._lengths, ids.numpy(), self._n_words)
        index, row = places.wrong
        if index >= 0:
            words = "" if self._n_words == _ANY_WORD else f", which has {self._n_words}"
            raise ModelError(
                f"token {int(ids[index])} of {getattr(self._sequences[row], 'uid', row)} is no word of the model{words}",
                where="put",
                fix="pass each uid once, with one token or more of the vocabulary",
            )
        self._ids, self._places, self._is_padded = ids, places, bool(padding)

    @property
    def current_tokens(self) -> int:
        """New tokens of all sequences."""
        return self._n_tokens

    @property
    def current_sequences(self) -> int:
        return len(self._sequences)

    @property
    def tensor_toks(self) -> int:
        """Tokens of ``input_ids``, padding too."""
        return to_padded(self._n_tokens) if self._is_padded else self._n_tokens

    def input_ids(self, on_device: bool = True) -> torch.Tensor:
        """The new tokens, int64 [tensor_toks]."""
        self._require_final()
        return self._padded(self._ids)

    def batch_metadata_buffer(self, on_device: bool = True) -> torch.Tensor:
        """(tokens, sequences), int32 [2]."""
        self._require_final()
        return torch.tensor([self._n_tokens, len(self._sequences)], dtype=torch.int32)

    def tokens_to_seq(self, on_device: bool = True) -> torch.Tensor:
        """The place in the batch of each token's sequence, int32 [tensor_toks]."""
        self._require_final()
        rows = torch.arange(len(self._sequences), dtype=torch.int32)
        return self._padded(rows.repeat_interleave(torch.tensor(self._lengths, dtype=torch.int64)))

    def inflight_seq_descriptors(self, on_device: bool = True) -> torch.Tensor:
        """(first token in the batch, new tokens, tokens before, 0) of each sequence, int32 [sequences, 4]."""
        n_new = torch.tensor(self._lengths, dtype=torch.int64)
        columns = (self.last_tokens - n_new + 1, n_new, self.n_keys - n_new, torch.zeros_like(n_new))
        return torch.stack(columns, 1).int()

    def kv_ptrs(self, on_device: bool = True) -> torch.Tensor:
        """The ``kv_blocks_ptr`` of each sequence, int64 [sequences]."""
        self._require_final()
        return torch.tensor([each.kv_blocks_ptr for each in self._sequences], dtype=torch.int64)

    def masks(self, on_device: bool = True) -> torch.Tensor | None:
        """None: a token sees the tokens before it."""
        return None

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence."""
        return self._lengths

    @property
    def positions(self) -> torch.Tensor:
        """The position of each token in its sequence, int64 [current_tokens]."""
        return _numbers(self._require_final().positions)

    @property
    def last_tokens(self) -> torch.Tensor:
        """The place in the batch of each sequence's last token, int64 [sequences]."""
        return _numbers(self._require_final().last)

    @property
    def n_keys(self) -> torch.Tensor:
        """Tokens of each sequence, the new ones too, int64 [sequences]."""
        return _numbers(self._require_final().n_keys)

    @property
    def n_columns(self) -> int:
        """Blocks of the longest sequence."""
        return self._require_final().n_columns

    def _padded(self, numbers: torch.Tensor) -> torch.Tensor:
        n_more = self.tensor_toks - self._n_tokens
        return torch.nn.functional.pad(numbers, (0, n_more), value=_PADDING) if n_more else numbers

    def _require_final(self) -> _C.KvBatch:
        if self._places is None:
            raise StateError(
                f"the tensors of {self.current_sequences} sequences are not put together",
                where="RaggedBatchWrapper",
                fix="call finalize after the last insert_sequence",
            )
        return self._places

    def _require_room(self, n_tokens: int) -> None:
        config, result = self._config, SchedulingResult
        for name, n, most, limit in (
            (
                "sequences",
                len(self._sequences) + 1,
                config.max_ragged_sequence_count,
                result.BatchSequenceLimitExceeded,
            ),
            ("tokens", self._n_tokens + n_tokens, config.max_ragged_batch_size, result.BatchTokenLimitExceeded),
        ):
            if n > most:
                raise SchedulingError(
                    limit,
                    f"the batch needs {n} {name}, and {most} are the most",
                    where="RaggedBatchWrapper.insert_sequence",
                    fix="leave the sequence to the next batch",
                )


def _numbers(array: bytearray) -> torch.Tensor:
    return torch.frombuffer(array, dtype=torch.int64) if array else torch.empty(0, dtype=torch.int64)
