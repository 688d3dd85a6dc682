"""Tokenizers of served models, under MII's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from deepspeed_c.errors import ModelError
from deepspeed_c.serving.tokenizer import read_tokenizer

__all__ = ["HFTokenizer", "MIITokenizerWrapper", "load_tokenizer"]

# Attributes of tokenizers with the end token. The first one that is set counts.
_ENDS = ("eod", "eos_token_id", "eod_id")


class MIITokenizerWrapper(ABC):
    """A tokenizer of any origin. A subclass may be the ``tokenizer`` of ``ModelConfig``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Words; tokens from there on are never chosen."""

    @property
    @abstractmethod
    def eos_token_id(self) -> int:
        """The end token."""

    @abstractmethod
    def encode(self, input: str) -> torch.Tensor:
        """The tokens of a text, integers [tokens]."""

    @abstractmethod
    def decode(self, tokens: torch.Tensor) -> str:
        """The text of tokens."""


class HFTokenizer(MIITokenizerWrapper):
    """A tokenizer of transformers, or the folder of one. Code that lies in the folder does not run.

    Raises ModelError for a folder without a tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if isinstance(tokenizer, str):
            tokenizer = read_tokenizer(tokenizer)
        super().__init__(tokenizer)

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def eos_token_id(self) -> int:
        """Raises ModelError for a tokenizer without one."""
        for name in _ENDS:
            if isinstance(token := getattr(self.tokenizer, name, None), int):
                return token
        raise ModelError(
            f"{type(self.tokenizer).__name__} has no end token",
            where="tokenizer.eos_token_id",
            fix=f"set one of {', '.join(_ENDS)}",
        )

    def encode(self, input: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer.encode(input), dtype=torch.int64)

    def convert_tokens_to_ids(self, input: str) -> int:
        """The token of that name."""
        return self.tokenizer.convert_tokens_to_ids(input)

    def decode(self, tokens: Any) -> str:
        return self.tokenizer.decode(tokens)


def load_tokenizer(model_config: Any) -> MIITokenizerWrapper:
    """The tokenizer of a ``ModelConfig``. The default is in the model's folder."""
    from transformers import PreTrainedTokenizerBase

    given = model_config.tokenizer or model_config.model_name_or_path
    return HFTokenizer(given) if isinstance(given, (str, PreTrainedTokenizerBase)) else given
