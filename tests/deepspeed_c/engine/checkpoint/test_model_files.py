"""save_model writes the weights of a plain model in Hugging Face's layout at every stage. It fails on all ranks or on
none."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch

import deepspeed_c
from deepspeed_c.errors import CheckpointError, StateError
from deepspeed_c.utils import safe_get_full_fp32_param
from tests.deepspeed_c.engine.test_weights import check_equal, make, plain
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch, make_model
from tests.ranks import run_ranks

BF16, F32 = torch.bfloat16, torch.float32


def read(folder: str) -> dict[str, torch.Tensor]:
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return safetensors.torch.load_file(os.path.join(folder, "model.safetensors"))
    with open(index) as file:
        weight_map = json.load(file)["weight_map"]
    return {name: safetensors.torch.load_file(os.path.join(folder, f))[name] for name, f in weight_map.items()}


def check_model(folder: str, want: dict[str, torch.Tensor], label: str) -> None:
    got = read(folder)
    check_equal({name: got[name] for name in want if name in got}, want, label)
    assert set(got) == set(want), f"{label}: {sorted(got)}"


def without_aliases(trait: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = make_model(TRAITS[trait])
    first = {name for name, _ in model.named_parameters()}  # names a tied parameter once
    return {name: value for name, value in state.items() if name in first or name == "table"}


def saving_body(rank: int, world: int, folder: str, trait: str, stage: int, dtype: str) -> None:
    kind = {"fp32": F32, "bf16": BF16}[dtype]
    model, engine = make(trait, stage, dtype)
    want = without_aliases(trait, plain(trait, kind))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    label = f"{trait} stage {stage} {dtype} world {world}"
    with engine:
        for size in ("5GB", 40, 1):
            path = os.path.join(folder, f"{label} {size}")
            assert engine.save_model(path, max_shard_size=size) is None
            check_model(path, want, label)
            n_files = len([name for name in os.listdir(path) if name.endswith(".safetensors")])
            assert (n_files == 1) == (size == "5GB") and n_files <= len(want), n_files
        path = os.path.join(folder, f"{label} trained")
        engine.save_model(path, exclude_frozen_parameters=True)
        check_model(path, {k: v for k, v in want.items() if k not in frozen}, label)
        # Save after a step, when masters hold more digits than weights.
        x, y = batch(0, 0, rank, 0)
        engine.backward(engine(x.to(kind), y))
        engine.step()
        state = without_aliases(trait, engine.module_state_dict())
        masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        for out in (None, F32, BF16, torch.float16):
            path = os.path.join(folder, f"{label} {out}")
            engine.save_model(path, dtype=out)
            expected = {}
            for name, value in state.items():
                if out is None or name == "table":
                    expected[name] = value
                else:
                    master = masters[name]
                    expected[name] = (value if master is None or out == kind else master).to(out)
            check_model(path, expected, f"{label} {out}")
        # Weights in the folder are replaced; other files in it stay.
        if rank == 0:
            with open(os.path.join(path, "tokenizer.json"), "w") as file:
                file.write("{}")
        torch.distributed.barrier()
        engine.save_model(path, max_shard_size=40)
        check_model(path, state, label)
        assert "tokenizer.json" in os.listdir(path) and "model.safetensors" not in os.listdir(path)
    try:
        engine.save_model(folder)
    except StateError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("a closed engine saved")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("trait", ["tied", "frozen", "zero_size"])
def test_saved_model_is_a_plain_models(tmp_path, trait: str, world: int) -> None:
    cases = (
        [(3, "bf16"), (1, "bf16"), (3, "fp32"), (0, "bf16"), (2, "fp32")] if world == 2 else [(3, "bf16"), (1, "bf16")]
    )
    for stage, dtype in cases:
        run_ranks(world, saving_body, str(tmp_path), trait, stage, dtype)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def refused_body(rank: int, world: int, folder: str) -> None:
    _, engine = make("tied", 3, "bf16")
    with open(os.path.join(folder, f"file{rank}"), "w"):
        pass
    with engine:
        for path, options, error in (
            (os.path.join(folder, "file0"), {}, CheckpointError),
            (os.path.join(folder, "file0", "below"), {}, CheckpointError),
            (os.path.join(folder, "out"), {"max_shard_size": "5 gallons"}, CheckpointError),
            (os.path.join(folder, "out"), {"dtype": torch.int8}, StateError),
            (os.path.join(folder, "out"), {"dtype": "bf16"}, StateError),
            (os.path.join(folder, "out"), {"dtype": torch.float8_e4m3fnuz}, CheckpointError),
        ):
            try:
                engine.save_model(path, **options)
            except error:
                pass
            else:
                raise AssertionError(f"{path}, {options}: no error on rank {rank}")
        # No rank hangs and no weight is lost: the model can be saved elsewhere.
        engine.save_model(os.path.join(folder, "out"))


def test_what_cannot_be_written_is_an_error_on_all_ranks(tmp_path) -> None:
    run_ranks(2, refused_body, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["file0", "file1", "out"]


class Config:
    """Stands in for a configuration of transformers."""

    def __init__(self) -> None:
        self.architectures = None

    def save_pretrained(self, folder: str) -> None:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({"architectures": self.architectures}, file)


def config_body(rank: int, world: int, folder: str) -> None:
    model = make_model(TRAITS["tied"])
    model.config = Config()
    with deepspeed_c.initialize(model=model, config=make_config(3, "bf16", 1, {}))[0] as engine:
        engine.save_model(folder)
        assert model.config.architectures is None


def test_configuration_is_written_beside(tmp_path) -> None:
    run_ranks(2, config_body, str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content == {"architectures": [type(make_model(TRAITS["tied"])).__name__]}


def live_body(rank: int, world: int, folder: str, stage: int) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    with deepspeed_c.initialize(model=model, config=make_config(stage, "bf16", 1, {}))[0] as engine:
        engine.save_model(folder, max_shard_size="10KB")
        state = engine.module_state_dict()
    if rank == 0:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        check_equal(dict(loaded.state_dict()), state, f"stage {stage}")


@pytest.mark.parametrize("stage", [1, 3])
def test_transformers_read_it(tmp_path, stage: int) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, live_body, str(tmp_path / "out"), stage)
