"""Every causal family of transformers is cut on trial. The results are compared with a table in a file.

A result is ``cut`` (the trial agrees with the whole model), ``hardly`` (the trial agrees, but more than three quarters
of the model stay on a rank, so there is a warning), or the text of the ModelError.
``python -m tests.deepspeed_c.inject.test_causal`` writes the table anew. Look at the difference before you commit it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject.cutting import preview_cut
from deepspeed_c.logging import logger

TABLE = Path(__file__).with_name("causal.tsv")
MOST_ELEMS = 12_000_000  # a family that accepts none of the sizes below has the size of its real models
SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "vocab_size": 101, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 40, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 14, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
SLOW = ("nemotron_h", "kimi_linear")
"""Families whose own code has a scan in Python and takes seconds."""


def build(kind: str) -> torch.nn.Module | None:
    """The model of a family, without data. None if it cannot be built from these sizes."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    made = transformers.CONFIG_MAPPING[kind]
    renamed = getattr(made, "attribute_map", {})
    sizes = dict(SIZES)
    if {"kv_lora_rank", renamed.get("kv_lora_rank")} & set(getattr(made, "__dataclass_fields__", {})):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # latent attention has a key for each head
    sizes = {renamed.get(name, name): value for name, value in sizes.items()}
    sizes = {name: value for name, value in sizes.items() if name in getattr(made, "__dataclass_fields__", {})}
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made(**sizes))
    # A class may raise any error if sizes do not fit it or a package is missing.
    except (
        StrictDataclassError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        TypeError,
        ValueError,
    ):
        return None
    return model if sum(param.numel() for param in model.parameters()) <= MOST_ELEMS else None


def verdict(model: torch.nn.Module) -> str:
    try:
        report = preview_cut(model, TensorParallel(), 0, 2)
    except ModelError as error:
        # Leave out numbers: they depend on the version of torch.
        return "refused: " + re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", " ".join(str(error).split()))[:120]
    return "hardly" if report.local_elems > 0.75 * report.logical_elems else "cut"


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in SLOW]


def read() -> dict[str, str]:
    return dict(line.split("\t") for line in TABLE.read_text().splitlines())


PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_the_verdict_of_every_family_is_the_one_in_the_table(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    expected, wrong, n_tried = read(), {}, 0
    # Skip families that only another version of transformers has.
    for kind in families()[part::PARTS]:
        said.clear()
        model = build(kind) if kind in expected else None
        if model is None:
            continue
        found, n_tried = verdict(model), n_tried + 1
        if found != expected[kind] or any("saves little" in text for text in said) != (found == "hardly"):
            wrong[kind] = (found, expected[kind], said[:])
    assert n_tried > 8
    assert not wrong, "\n".join(f"{kind}: {pair}" for kind, pair in wrong.items())


def test_the_table_has_every_kind_of_verdict() -> None:
    found = read()
    assert (
        sum(value == "cut" for value in found.values()) > 70 and sum(value == "hardly" for value in found.values()) > 3
    )
    for kind in ("llama", "gpt_oss", "mpt", "codegen", "gpt_bigcode", "mixtral", "deepseek_v3", "bloom", "falcon"):
        assert found[kind] == "cut", (kind, found[kind])


if __name__ == "__main__":
    models = ((kind, build(kind)) for kind in families())
    TABLE.write_text("".join(f"{kind}\t{verdict(model)}\n" for kind, model in models if model is not None))
