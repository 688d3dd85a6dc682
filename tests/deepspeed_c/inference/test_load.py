"""Fills models on the meta device from files, on one rank and on several: weights, outputs, memory, and files that do not
fit."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepspeed_c
from deepspeed_c.checkpoint.formats import huggingface
from deepspeed_c.checkpoint.source import Read
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import CheckpointError, ModelError
from deepspeed_c.inference.load import load_checkpoint, save_mp_checkpoint
from deepspeed_c.logging import logger
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks
from tests.training import config, engine_of

PRELOAD = "tests.deepspeed_c.inject.preload"
FAMILIES = ("llama_tied_shared", "gpt2", "bloom", "opt", "mixtral", "t5", "gptj", "deepseek_v3")


def outputs(model: torch.nn.Module, family: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**feed(family)).logits


def cut_on_meta(family: str, world: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    with deepspeed_c.OnDevice(dtype=dtype, device="meta"):
        model = make(family).eval()
    return deepspeed_c.tp_model_init(model, world, None)


def mesh_of(world: int) -> Mesh:
    return Mesh(Collectives()).split_tensors(world)


def part_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    cut = getattr(param, "tp_cut", None)
    return whole if cut is None else cut.take(whole)


def check_weights(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Each tensor of ``model`` is this rank's part of the tensor in ``state``, bit for bit."""
    own = model.state_dict(keep_vars=True)
    assert list(own) == list(state)
    for name, tensor in own.items():
        wanted = part_of(tensor, state[name]).to(tensor.dtype)
        assert torch.equal(tensor, wanted), f"{name}: {tensor} is not {wanted}"


def load_families(rank: int, world: int, folder: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    found = []
    for family in FAMILIES:
        plain = make(family).eval()
        model = cut_on_meta(family, world)
        assert all(param.is_meta for param in model.parameters())
        n_tied = len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.named_parameters()))
        load_checkpoint(model, f"{folder}/{family}", mesh=mesh_of(world), dtype=None)
        check_weights(model, plain.state_dict())
        still = len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.named_parameters()))
        assert still == n_tied, f"{family}: {still} tied weights after the load, {n_tied} before"
        for (name, buffer), (_, wanted) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(buffer, wanted), f"{family} {name}: {buffer} is not {wanted}"
        found.append((family, outputs(model, family), outputs(plain, family)))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_meta_models_of_transformers_compute_as_those_that_were_saved(tmp_path: Path, world: int) -> None:
    for family in FAMILIES:
        make(family).save_pretrained(tmp_path / family)
    for of_rank in run_ranks(world, load_families, str(tmp_path), preload=PRELOAD):
        for family, got, wanted in of_rank:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=3e-6, msg=lambda m, f=family: f"{f}: {m}")


def write_forms(folder: Path) -> list[Any]:
    """The same weights of a GPT-2 in all forms of files."""
    model = make("gpt2")
    model.save_pretrained(folder / "hf")
    model.save_pretrained(folder / "sharded", max_shard_size="40KB")
    assert (folder / "sharded" / "model.safetensors.index.json").exists()
    state = model.state_dict()
    (folder / "bin").mkdir()
    torch.save(state, folder / "bin" / "pytorch_model.bin")
    (folder / "bins").mkdir()
    names = [name for name in state if name != "lm_head.weight"]
    halves = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, of_file in halves.items():
        torch.save({name: state[name] for name in of_file}, folder / "bins" / file)
        save_file({name: state[name] for name in of_file}, folder / "bins" / file.replace(".bin", ".safetensors"))
    weight_map = {name: file for file, of_file in halves.items() for name in of_file}
    (folder / "bins" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    # Names without the prefix of the causal model, and a transposed weight: not contiguous in its file.
    bare = {name.removeprefix("transformer."): value for name, value in state.items() if name in names}
    bare["h.0.mlp.c_fc.weight"] = bare["h.0.mlp.c_fc.weight"].t().contiguous().t()
    torch.save({"module": bare}, folder / "bare.pt")
    files = {"type": "ds_model", "checkpoints": ["a.safetensors", "b.bin"], "version": 1.0}
    (folder / "bins" / "list.json").write_text(json.dumps({**files, "parallelization": "pp"}))
    return [
        str(folder / "hf"),
        str(folder / "hf" / "model.safetensors"),
        str(folder / "sharded"),
        str(folder / "sharded" / "model.safetensors.index.json"),
        str(folder / "bin"),
        str(folder / "bins"),
        str(folder / "bare.pt"),
        str(folder / "bins" / "list.json"),
        files,
        {**files, "type": "BLOOM", "base_dir": str(folder / "bins")},
        str(folder / "engine"),
    ]


def save_engine(rank: int, world: int, folder: str) -> None:
    """Weights in bf16 with masters in fp32, of an engine that shards them."""
    with engine_of(make("gpt2"), config(3, "Adam", lr=1e-3, bf16={"enabled": True})) as engine:
        engine.save_checkpoint(folder, "step")


def load_forms(rank: int, world: int, forms: list[Any], base_dir: str) -> None:
    state, in_place = make("gpt2").state_dict(), [forms[0], forms[6]]
    for form in forms:
        model = cut_on_meta("gpt2", world)
        load_checkpoint(model, form, base_dir=base_dir, mesh=mesh_of(world), dtype=None)
        check_weights(model, state)
        if form not in in_place:
            continue
        # A model that has memory is filled in place.
        model = deepspeed_c.tp_model_init(make("gpt2").eval(), world, None)
        places = [param.data_ptr() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float("nan"))
        load_checkpoint(model, form, base_dir=base_dir, mesh=mesh_of(world), dtype=torch.bfloat16)
        check_weights(model, state)
        assert [param.data_ptr() for param in model.parameters()] == places


def test_every_form_of_files(tmp_path: Path) -> None:
    forms = write_forms(tmp_path)
    run_ranks(2, save_engine, str(tmp_path / "engine"), preload=PRELOAD)
    for world in (1, 2):
        run_ranks(world, load_forms, forms, str(tmp_path / "bins"), preload=PRELOAD)


def load_in_bf16(rank: int, world: int, folder: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    model = cut_on_meta("llama", world, torch.bfloat16)
    load_checkpoint(model, folder, mesh=mesh_of(world), dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    check_weights(model, {n: t.bfloat16() for n, t in make("llama").state_dict().items()})
    rotary = make("llama").model.rotary_emb
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    return model.model.rotary_emb.inv_freq, rotary.inv_freq


def test_frequencies_stay_in_fp32_in_a_model_of_16_bits(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    for got, wanted in run_ranks(2, load_in_bf16, str(tmp_path), preload=PRELOAD):
        assert torch.equal(got, wanted), f"{got} {wanted}"


def peak_and_bytes(rank: int, world: int, folder: str) -> dict[str, int]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    deepspeed_c.tp_model_init(model, world, None)
    mesh = mesh_of(world)
    shard = sum(param.numel() * 4 for param in model.parameters())
    n_read, read = [0], huggingface.fill_from_file

    def count(wanted: Read, file: int, offset: int, where: str) -> None:
        n_read[0] += wanted.into.nbytes
        read(wanted, file, offset, where)

    huggingface.fill_from_file = count
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _resident("VmRSS")
        load_checkpoint(model, folder, mesh=mesh, dtype=None)
        return {"peak": _resident("VmHWM") - before, "shard": shard, "read": n_read[0]}
    finally:
        huggingface.fill_from_file = read


def _resident(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def test_a_rank_reads_and_holds_its_part_and_one_tensor(tmp_path: Path) -> None:
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8, vocab_size=4000
        )
    )
    model.save_pretrained(tmp_path)
    whole = sum(param.numel() * 4 for param in model.parameters())
    largest = max(param.numel() * 4 for param in model.parameters())
    del model
    for found in run_ranks(2, peak_and_bytes, str(tmp_path), preload=PRELOAD):
        print(found, f"{whole=} {largest=}")
        assert found["shard"] < 0.51 * whole
        assert found["read"] == found["shard"], f"{found} {whole=}"
        assert found["peak"] < found["shard"] + largest, f"{found} {whole=} {largest=}"


def raised(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        function(*args, **kwargs)
    except (CheckpointError, ModelError) as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def load_bad(rank: int, world: int, cases: list[Any]) -> list[tuple[str, str]]:
    found = []
    for case in cases:
        checkpoint = case[rank] if isinstance(case, list) else case
        model = cut_on_meta("gpt2", world)
        found.append(raised(load_checkpoint, model, checkpoint, mesh=mesh_of(world), dtype=None))
        assert all(param.is_meta for param in model.parameters()), "memory was taken before the error"
    return found


def test_what_does_not_fit_is_an_error_on_all_ranks_before_anything_is_made(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state = load_file(file)
    (tmp_path / "empty").mkdir()
    save_file({n: t for n, t in state.items() if ".h.1." not in n}, tmp_path / "missing.safetensors")
    wrong = {**state, "transformer.h.1.attn.c_attn.weight": torch.zeros(48, 140)}
    save_file(wrong, tmp_path / "shape.safetensors")
    (tmp_path / "short.safetensors").write_bytes(file.read_bytes()[:-100])
    torch.save(state, tmp_path / "whole.bin")
    (tmp_path / "short.bin").write_bytes((tmp_path / "whole.bin").read_bytes()[:-5000])
    save_file({**state, "transformer.h.0.mlp.c_fc.weight": torch.zeros(48, 192).char()}, tmp_path / "int8.safetensors")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"w": os.system}, tmp_path / "code.pt")
    (tmp_path / "bad.json").write_text("[]")
    files = {"type": "ds_model", "checkpoints": [str(file)], "version": 1.0}
    cases: list[tuple[Any, str]] = [
        (str(tmp_path / "nothing"), "nothing: does not exist"),
        (str(tmp_path / "empty"), "empty: holds no checkpoint"),
        (str(tmp_path / "missing.safetensors"), r"12 of the model's 28 weights are missing: transformer\.h\.1\."),
        (str(tmp_path / "shape.safetensors"), r"h\.1\.attn\.c_attn\.weight has shape \(48, 140\).*\(48, 144\)"),
        (str(tmp_path / "short.safetensors"), r"tensors end at byte \d+, the file has \d+"),
        (str(tmp_path / "short.bin"), "short.bin"),
        (str(tmp_path / "int8.safetensors"), r"c_fc\.weight is quantized \(torch\.int8\)"),
        (str(tmp_path / "list.pt"), "holds no state dict, but a list"),
        (str(tmp_path / "code.pt"), r"code\.pt"),
        (str(tmp_path / "bad.json"), "is a list, no object"),
        ({**files, "type": "GPT"}, "'GPT' is no type of checkpoint"),
        ({**files, "parallelization": "dp"}, "'dp' is no way that files are divided"),
        ({**files, "checkpoints": []}, "lists no file"),
        ({**files, "checkpoints": "a.bin"}, "'a.bin' is no list of files"),
        ({**files, "checkpoints": ["a.bin"]}, r"there is no file .*a\.bin"),
        ({**files, "parallelization": "tp"}, "files are of 1 tensor-parallel ranks, and there are 2"),
        ({**files, "parallelization": "tp", "tp_size": 2}, "1 files are no multiple of tp_size 2"),
        ([str(tmp_path / "hf"), str(tmp_path / "nothing")], "nothing: does not exist|rank 1 on .*: does not exist"),
    ]
    results = run_ranks(2, load_bad, [checkpoint for checkpoint, _ in cases], preload=PRELOAD)
    for i, (checkpoint, expected) in enumerate(cases):
        for rank, of_rank in enumerate(results):
            kind, text = of_rank[i]
            assert kind == "CheckpointError", f"{checkpoint} on rank {rank}: {kind} {text}"
            assert re.search(expected, text), f"{checkpoint} on rank {rank}: {text!r} lacks {expected!r}"


def load_bad_experts(rank: int, world: int, paths: list[str]) -> list[tuple[str, str]]:
    found = []
    for path in paths:
        model = cut_on_meta("mixtral", world)
        found.append(raised(load_checkpoint, model, path, mesh=mesh_of(world), dtype=None))
        assert all(param.is_meta for param in model.parameters())
    return found


def test_experts_that_are_missing_or_of_other_shapes(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    experts = "model.layers.1.block_sparse_moe.experts"
    assert f"{experts}.2.w1.weight" in state, list(state)
    without = {n: t for n, t in state.items() if n != f"{experts}.2.w1.weight"}
    without_all = {n: t for n, t in state.items() if not n.startswith(f"{experts}.2.")}
    narrow = {**state, f"{experts}.0.w2.weight": torch.zeros(48, 80)}
    cases = [
        (without, r"layers\.1\.mlp\.experts\.gate_up_proj cannot be made of 5 tensors"),
        (without_all, r"gate_up_proj has shape \(2, 176, 48\), the model's has \(3, 176, 48\)"),
        (narrow, r"layers\.1\.mlp\.experts\.down_proj cannot be made of 3 tensors"),
    ]
    paths = [str(tmp_path / f"{i}.safetensors") for i in range(len(cases))]
    for path, (weights, _) in zip(paths, cases):
        save_file(weights, path)
    for of_rank in run_ranks(2, load_bad_experts, paths, preload=PRELOAD):
        for (kind, text), (_, expected) in zip(of_rank, cases, strict=True):
            assert kind == "CheckpointError" and re.search(expected, text), f"{kind} {text!r} lacks {expected!r}"


def load_more(rank: int, world: int, path: str) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    try:
        model = cut_on_meta("gpt2", world)
        load_checkpoint(model, path, mesh=mesh_of(world), dtype=None)
    finally:
        logger.removeHandler(handler)
    check_weights(model, make("gpt2").state_dict())
    return [text for text in found if "are not loaded" in text]


def test_tensors_that_the_model_lacks_are_a_warning_of_rank_0(tmp_path: Path) -> None:
    names = {n: t for n, t in make("gpt2").state_dict().items() if n != "lm_head.weight"}
    more = {"score.weight": torch.zeros(3), "transformer.h.0.attn.bias": torch.zeros(1, 1, 4, 4)}
    save_file({**names, **more}, tmp_path / "more.safetensors")
    first, second = run_ranks(2, load_more, str(tmp_path / "more.safetensors"), preload=PRELOAD)
    assert len(first) == 1 and "(1)" in first[0] and "score.weight" in first[0], first
    assert second == []


def save_and_load(rank: int, world: int, family: str, hf: str, folder: str) -> None:
    model = cut_on_meta(family, world)
    load_checkpoint(model, hf, mesh=mesh_of(world), dtype=None)
    save_mp_checkpoint(model, folder, mesh=mesh_of(world))
    load_again(rank, world, family, folder)


def load_again(rank: int, world: int, family: str, folder: str) -> None:
    for checkpoint in (folder, os.path.join(folder, "ds_inference_config.json")):
        model = cut_on_meta(family, world)
        load_checkpoint(model, checkpoint, mesh=mesh_of(world), dtype=None)
        check_weights(model, make(family).state_dict())


@pytest.mark.parametrize("family", ["gpt2", "llama_tied_shared", "mixtral"])
def test_what_two_ranks_save_is_read_by_any_number_and_by_transformers(tmp_path: Path, family: str) -> None:
    import transformers

    make(family).save_pretrained(tmp_path / "hf")
    folder = str(tmp_path / "cut")
    run_ranks(2, save_and_load, family, str(tmp_path / "hf"), folder, preload=PRELOAD)
    for world in (1, 3):
        run_ranks(world, load_again, family, folder, preload=PRELOAD)
    content = json.loads((tmp_path / "cut" / "ds_inference_config.json").read_text())
    assert content["type"] == "ds_model" and content["checkpoints"] == ["model.safetensors"], content
    read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    check_weights(read, make(family).state_dict())


def save_to_nowhere(rank: int, world: int, folder: str) -> tuple[str, str]:
    model = deepspeed_c.tp_model_init(make("gpt2"), world, None)
    return raised(save_mp_checkpoint, model, folder, mesh=mesh_of(world))


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for kind, text in run_ranks(2, save_to_nowhere, str(tmp_path / "file" / "below"), preload=PRELOAD):
        assert kind == "CheckpointError" and "below" in text, (kind, text)


def load_parts(rank: int, world: int, folder: str) -> None:
    """Loads a file for each tensor-parallel rank and each half of the layers, and a file of tensors that all ranks have."""
    whole = make("gpt2").state_dict()
    cut = deepspeed_c.tp_model_init(make("gpt2"), world, None)
    own = {n: t.detach().contiguous() for n, t in cut.state_dict().items() if n != "lm_head.weight"}
    norms = [name for name in own if ".ln_" in name]
    for part in (0, 1):
        layer = {n: t for n, t in own.items() if n not in norms and (".h.1." in n) == bool(part)}
        torch.save(layer, f"{folder}/tp_{rank:02d}_{part:02d}.pt")
    if rank == 0:
        torch.save({n: own[n] for n in norms}, f"{folder}/non-tp.pt")
    torch.distributed.barrier()
    listed = {"non_tp": ["non-tp.pt"], "tp": [f"tp_{r:02d}_{p:02d}.pt" for p in (0, 1) for r in range(world)]}
    model = cut_on_meta("gpt2", world)
    checkpoint = {"type": "ds_model", "checkpoints": listed, "tp_size": world, "base_dir": folder, "version": 1.0}
    load_checkpoint(model, checkpoint, mesh=mesh_of(world), dtype=None)
    check_weights(model, whole)


def test_a_list_of_files_by_tensor_parallel_rank(tmp_path: Path) -> None:
    run_ranks(2, load_parts, str(tmp_path), preload=PRELOAD)
