"""Models of transformers for inference, and their answers."""

from __future__ import annotations

from typing import Any

import torch

from tests.deepspeed_c.inject import families

GENERATING = tuple(name for name in families.FAMILIES if name not in ("bert", "distilbert", "clip"))
TIE = 1e-4
"""Logits closer than this may be ordered in either way."""


def whisper() -> torch.nn.Module:
    import transformers as t

    torch.manual_seed(7)
    config = t.WhisperConfig(
        d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=70, decoder_ffn_dim=70, vocab_size=families.VOCAB, num_mel_bins=8, dropout=0.0,
        max_source_positions=20, max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return t.WhisperForConditionalGeneration(config).eval()


def like_bart(kind: str) -> torch.nn.Module:
    """A model with BART's layers: "bart", "mbart" or "marian"."""
    import transformers as t

    torch.manual_seed(7)
    sizes = {
        "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "encoder_ffn_dim": 70, "decoder_ffn_dim": 70, "vocab_size": families.VOCAB, "max_position_embeddings": 40, "dropout": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip
    name = {"bart": "Bart", "mbart": "MBart", "marian": "Marian"}[kind]
    model = t.MarianMTModel if kind == "marian" else getattr(t, f"{name}ForConditionalGeneration")
    return model(getattr(t, f"{name}Config")(**sizes)).eval()


def padded_prompts() -> dict[str, torch.Tensor]:
    """Two prompts, the first of which is padded on the left."""
    ids = torch.randint(3, families.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def require_same_tokens(ours: Any, theirs: Any) -> None:
    """Asserts that two generations with scores have the same tokens up to the first tie. Beams are compared by their
    own sums of scores."""
    if torch.equal(ours.sequences, theirs.sequences):
        return
    if getattr(theirs, "sequences_scores", None) is not None:
        assert torch.allclose(ours.sequences_scores, theirs.sequences_scores, atol=TIE), (ours, theirs)
        return
    begin = theirs.sequences.shape[1] - len(theirs.scores)
    for row, (mine, other) in enumerate(zip(ours.sequences, theirs.sequences, strict=True)):
        first = next((i for i in range(len(other)) if mine[i] != other[i]), None)
        if first is not None:
            scores = theirs.scores[first - begin][row]
            gap = float(scores[other[first]] - scores[mine[first]])
            assert abs(gap) < TIE, f"row {row}, token {first}: {mine.tolist()} and {other.tolist()}, apart by {gap}"
