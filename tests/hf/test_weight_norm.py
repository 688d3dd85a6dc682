"""Models of transformers with weight-normed convolutions load and train under stage 3, as in one plain process."""

from __future__ import annotations

import pytest
import torch

from tests.hf.stack import forget, on_ranks
from tests.hf.test_from_pretrained import stage3
from tests.training import config, engine_of, update, whole_weights

RATE, SAMPLES = 0.05, 400
FAMILIES = ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech")
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8, 8), "conv_stride": (5, 2),
    "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "vocab_size": 11,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean", "pad_token_id": 0,
}  # fmt: skip


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        "input_values": torch.randn(2, SAMPLES, generator=generator),
        "labels": torch.randint(1, 11, (2, 4), generator=generator),
    }


def written(rank: int, world: int, family: str, folder: str) -> dict[str, torch.Tensor]:
    """Saves the initial model to the folder.

    Returns the weights after two steps of SGD over the batches of two ranks.
    """
    import transformers

    forget()
    torch.manual_seed(2)
    model = getattr(transformers, f"{family}ForCTC")(getattr(transformers, f"{family}Config")(**SIZES)).train()
    model.save_pretrained(folder)
    for step in range(2):
        for r in range(2):
            (model(**batch(step, r)).loss / 2).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
                    p.grad = None
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(rank: int, world: int, family: str, folder: str) -> dict[str, torch.Tensor]:
    import transformers

    settings = config(3, lr=RATE, zero={"stage3_param_persistence_threshold": 0}, gradient_clipping=0.0)
    held = stage3()
    model = getattr(transformers, f"{family}ForCTC").from_pretrained(folder).train()
    engine = engine_of(model, settings)
    del held
    for step in range(2):
        update(engine, engine(**batch(step, rank)).loss)
    found = whole_weights(model)
    engine.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_and_trains(tmp_path, family: str) -> None:
    (want,) = on_ranks(1, written, family, str(tmp_path))
    assert any("original1" in name for name in want), "the installed transformers has no parametrization here"
    for got in on_ranks(2, trained, family, str(tmp_path)):
        assert set(got) == set(want)
        off = {name: (got[name] - value).abs().max().item() for name, value in want.items()}
        assert max(off.values()) < 5e-5, sorted(off.items(), key=lambda pair: -pair[1])[:3]
