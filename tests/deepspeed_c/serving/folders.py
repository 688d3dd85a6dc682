"""Folders with a small Llama and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.toys import llama

END = "<|end|>"
_LINES = ("def main(self, value): return value", "größer – ist 日本語 🙂 text", "for each in range(10): pass")


def byte_tokenizer(*special: str) -> Any:
    """A byte-level BPE of transformers: a character beyond ASCII takes several tokens. special: further special tokens,
    which decoding can hide."""
    import tokenizers
    import transformers

    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, *special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([line[:20] for line in _LINES], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END)


def model_folder(folder: Path, *special: str, **settings: Any) -> str:
    """A Llama in float32 whose likeliest token is far from the second, with ``byte_tokenizer``."""
    import torch

    tokenizer = byte_tokenizer(*special)
    model = llama(5, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **settings)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
