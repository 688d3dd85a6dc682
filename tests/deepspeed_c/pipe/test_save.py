"""Files of whole weights from a pipeline at ZeRO stage 3 are those of stage 0, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import Source
from deepspeed_c.checkpoint.tools.convert import Target, convert
from deepspeed_c.checkpoint.tools.export import export
from tests.deepspeed_c.checkpoint.formats.deepspeed.memory_source import whole
from tests.deepspeed_c.pipe.models import layers, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.deepspeed_c.pipe.test_stage3 import SMALL_UNITS, TIGHT
from tests.hf.stack import on_ranks
from tests.hf.test_pipeline import batches_of, model_of
from tests.hf.test_pipeline import engine_of as engine_of_layers
from tests.ranks import run_ranks
from tests.training import engine_of

BF16 = {"bf16": {"enabled": True}}


def zero_of(stage: int, limit: int) -> dict[str, Any]:
    tight = TIGHT | {"stage3_max_live_parameters": limit}
    return {"stage": stage, **(SMALL_UNITS | tight if stage == 3 else {})}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def check_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and got, (got.keys(), want.keys())
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), f"{name}: {got[name]} and {value}"


def save_body(rank: int, world: int, name: str, folder: str, more: dict[str, Any]) -> list[int]:
    """Saves at stages 0 and 3, with the first weights and with those after a batch at stage 0: sums of tied gradients
    have another order at stage 3. Returns the number of sharded units by stage."""
    from deepspeed_c.pipe import from_transformers

    n_units = []
    for stage in (0, 3):
        module = from_transformers(model_of(name), 2)
        with engine_of_layers(module, zero_optimization=zero_of(stage, 2048), **more) as engine:
            n_units.append(len(engine._fetcher.groups) if stage == 3 else 0)
            assert engine.save_16bit_model(f"{folder}/{stage}/before", max_shard_size="50KB")
            if stage == 0:
                engine.train_batch(iter(batches_of(0, module.mpu().get_data_parallel_rank())))
                engine.save_checkpoint(f"{folder}/saved", tag="trained")
            else:
                engine.load_checkpoint(f"{folder}/saved", tag="trained")
            assert engine.save_16bit_model(f"{folder}/{stage}/after", max_shard_size="50KB")
    return n_units


@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
def test_a_model_of_transformers_is_saved_whole(tmp_path, name, more):
    for n_units in on_ranks(4, save_body, name, str(tmp_path), more):
        assert n_units[1] > 3, n_units
    model = model_of(name).to(torch.bfloat16 if more else torch.float32)
    model.save_pretrained(tmp_path / "one process")
    check_same(tensors_of(tmp_path / "3" / "before"), tensors_of(tmp_path / "one process"))
    check_same(tensors_of(tmp_path / "3" / "after"), tensors_of(tmp_path / "0" / "after"))
    for when in ("before", "after"):
        ours, theirs = ({file.name: file.read_bytes() for file in (tmp_path / s / when).iterdir()} for s in "30")
        assert ours == theirs, when


def checkpoint_body(rank: int, world: int, folder: str, more: dict[str, Any]) -> None:
    """Trains at stage 0, and saves the same state at every stage."""
    for stage in (0, 1, 2, 3):
        net = module_of(2)
        settings = config_of(2, **more, zero_optimization=zero_of(stage, 768))
        with engine_of(net, settings) as engine:
            if stage == 0:
                data_rank = net.mpu().get_data_parallel_rank()
                for step in range(2):
                    engine.train_batch(iter(micro_batches(step, data_rank, 2)))
            else:
                engine.load_checkpoint(f"{folder}/saved", tag="stage0")
            engine.save_checkpoint(f"{folder}/saved", tag=f"stage{stage}")


def go_on_body(rank: int, world: int, folders: list[tuple[str, str]], more: dict[str, Any]) -> list[float]:
    """The loss of the next batch after a load of each of ``folders`` (folder, tag) at stage 3."""
    losses = []
    for folder, tag in folders:
        net = module_of(2)
        with engine_of(net, config_of(2, **more, zero_optimization=zero_of(3, 768))) as engine:
            engine.load_checkpoint(folder, tag=tag)
            for step in (2, 3):
                loss = engine.train_batch(iter(micro_batches(step, net.mpu().get_data_parallel_rank(), 2)))
            losses.append(float(loss))
    return losses


@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
def test_exports_and_deepspeeds_files_of_layers_are_whole(tmp_path, more):
    """Saved at any stage. Layer 8 is tied and has a ``forward_fn``, so it has no file in DeepSpeed."""
    run_ranks(4, checkpoint_body, str(tmp_path), more)
    dtype = torch.bfloat16 if more else torch.float32
    exported: list[dict[str, torch.Tensor]] = []
    for stage in range(4):
        at = tmp_path / str(stage)
        with open_checkpoint(str(tmp_path / "saved"), f"stage{stage}") as source:
            export(source, at / "exported", dtype=torch.float32)
            path = convert(source, at, "deepspeed", Target(tag="t", world_size=2))
            with open_checkpoint(path) as written:
                check_equal(written, source)
        exported.append(tensors_of(at / "exported"))
        check_same(exported[stage], exported[0])
        names = {file.name for file in Path(path).iterdir()}
        assert {name for name in names if name.startswith("layer_")} == {
            f"layer_{layer:02d}-model_states.pt" for layer in range(8)
        }, names
        assert len([name for name in names if "optim_states" in name]) == (2 if stage else 0), names
        model = torch.load(f"{path}/mp_rank_00_model_states.pt", weights_only=False)
        assert model["module"] is None and model["universal_checkpoint_info"]["pipeline_layers"]["tied"] == {
            "embed": [0]
        }
        for layer, spec in enumerate(layers()[:8]):
            built, content = spec.build(), torch.load(f"{path}/layer_{layer:02d}-model_states.pt", weights_only=True)
            built.load_state_dict(content)
            prefix = "tied_modules.embed." if layer == 0 else f"{layer}."
            for key, value in content.items():
                want = exported[0][prefix + key].to(dtype)
                assert value.dtype == dtype and torch.equal(value, want), f"{layer}, {key}: {value} and {want}"
    folders = [(str(tmp_path / "saved"), "stage3"), *((str(tmp_path / str(stage)), "t") for stage in (1, 3))]
    for native, *others in run_ranks(4, go_on_body, folders, more):
        assert others == [native, native], f"{others} and {native}"


def check_equal(written: Source, source: Source) -> None:
    """Asserts that both hold the same tensors, bit for bit."""
    assert written.tensors.keys() == source.tensors.keys(), written.tensors.keys() ^ source.tensors.keys()
    for kind, name in source.tensors:
        got, want = whole(written, kind, name), whole(source, kind, name)
        assert got.dtype == want.dtype and torch.equal(got, want), f"{kind} of {name}: {got} and {want}"
    assert {n: i.group for n, i in written.params.items()} == {n: i.group for n, i in source.params.items()}
