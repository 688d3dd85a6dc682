"""ZeRO-Inference from files: each rank reads the ranges of its own shard, and computes as the whole model does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import deepspeed_c
from deepspeed_c.checkpoint.formats import huggingface
from deepspeed_c.checkpoint.source import Read
from deepspeed_c.errors import CheckpointError, ConfigError, StateError
from deepspeed_c.zero.weights.param import state_of
from tests.cells import cells
from tests.deepspeed_c.inference.models import padded_prompts, require_same_tokens
from tests.deepspeed_c.inject.families import feed, make
from tests.ranks import run_ranks

pytest.importorskip("transformers")

PRELOAD = "tests.deepspeed_c.inject.preload"
FAMILIES = ("llama_tied_shared", "gpt2", "mixtral", "t5")
GREEDY = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}


def zero_of(kind: str, folder: str, **more: Any) -> dict[str, Any]:
    """The section "zero" for weights in shards, in host memory or in files."""
    offload = {
        "shards": {},
        "host": {"offload_param": {"device": "cpu"}},
        "nvme": {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}},
    }[kind]
    return {"stage": 3, "stage3_param_persistence_threshold": 100, **offload, **more}


def on_meta(family: str) -> torch.nn.Module:
    with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
        return make(family).eval()


def stream_families(rank: int, world: int, kind: str, folder: str, tp: int) -> list[str]:
    """Loads each family with small buckets, so that buckets and parameters are cut at odd places."""
    for family in FAMILIES:
        plain, model = make(family).eval(), on_meta(family)
        zero = zero_of(kind, folder, reduce_bucket_size=3001)
        with deepspeed_c.init_inference(
            model, checkpoint=f"{folder}/{family}", dtype=torch.float32, zero=zero, tensor_parallel={"tp_size": tp}
        ) as engine:
            is_whole_here = world // tp == 1 and kind != "nvme"
            sharded = [p for p in model.parameters() if not is_whole_here and state_of(p).persists is False]
            assert bool(sharded) != is_whole_here, f"{family}: {len(sharded)} parameters are sharded"
            state = plain.state_dict()
            own = engine.module_state_dict()
            assert list(own) == list(state)
            for name, tensor in own.items():
                assert torch.equal(tensor, state[name]), f"{family} {name}: {tensor} is not {state[name]}"
            tied = [len(list(m.named_parameters(remove_duplicate=False))) for m in (model, plain)]
            assert tied[0] - len(list(model.parameters())) == tied[1] - len(list(plain.parameters())), family
            buffers = dict(plain.named_buffers())
            for name, buffer in model.named_buffers():
                assert torch.equal(buffer, buffers[name]), f"{family} {name}: {buffer} is not {buffers[name]}"
            with torch.no_grad():
                got, wanted = engine(**feed(family)).logits, plain(**feed(family)).logits
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=3e-6, msg=lambda m, f=family: f"{f}: {m}")
            require_same_tokens(
                engine.generate(**padded_prompts(), **GREEDY), plain.generate(**padded_prompts(), **GREEDY)
            )


@pytest.mark.parametrize(("kind", "ranks"), cells(("shards", "host", "nvme"), ((1, 1), (2, 1), (4, 2)), at_once=1))
def test_models_that_are_streamed_compute_as_those_that_were_saved(
    tmp_path: Path, kind: str, ranks: tuple[int, int]
) -> None:
    for family in FAMILIES:
        make(family).save_pretrained(tmp_path / family)
    world, tp = ranks
    run_ranks(world, stream_families, kind, str(tmp_path), tp, preload=PRELOAD)


def _resident(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def peak_of_stream(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    zero = zero_of(kind, folder, reduce_bucket_size=200_000)
    zero.get("offload_param", {}).update(buffer_count=3)
    n_read, longest, read = 0, 0, huggingface.fill_from_file

    def count(wanted: Read, file: int, offset: int, where: str) -> None:
        nonlocal n_read, longest
        n_read, longest = n_read + wanted.into.nbytes, max(longest, wanted.into.nbytes)
        read(wanted, file, offset, where)

    huggingface.fill_from_file = count
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _resident("VmRSS")
        engine = deepspeed_c.init_inference(model, checkpoint=folder, dtype=torch.float32, zero=zero)
        peak, after = _resident("VmHWM") - before, _resident("VmRSS") - before
    finally:
        huggingface.fill_from_file = read
    with engine, torch.no_grad():
        logits = engine(torch.arange(7)[None]).logits
        whole = sum(state_of(p).persists * p.numel() * 4 for p in model.parameters() if state_of(p) is not None)
    return {"peak": peak, "after": after, "read": n_read, "longest": longest, "persists": whole, "logits": logits}


@pytest.mark.parametrize(("kind", "world"), cells(("shards", "host", "nvme"), (1, 2), at_once=1))
def test_a_rank_reads_its_shard_and_never_holds_the_whole(tmp_path: Path, kind: str, world: int) -> None:
    import transformers

    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8, vocab_size=4001
        )
    ).eval()
    model.save_pretrained(tmp_path)
    whole = sum(param.numel() * 4 for param in model.parameters())
    largest = max(param.numel() * 4 for param in model.parameters())
    with torch.no_grad():
        wanted = model(torch.arange(7)[None]).logits
    of_ranks = run_ranks(world, peak_of_stream, kind, str(tmp_path), preload=PRELOAD)
    total = sum(found["read"] for found in of_ranks)
    for found in of_ranks:
        torch.testing.assert_close(found.pop("logits"), wanted, rtol=1e-4, atol=1e-4)
        print(kind, world, found, f"{whole=} {largest=}")
        # Buckets end at parameters, so slices differ by one parameter at most.
        assert found["read"] <= whole / world + largest, f"{found} {whole=} {world=}"
        # In memory: the shard, or with files the buckets that are being read and written, which hold one tensor each.
        # The allocator keeps some freed buckets, and the first transfer starts threads.
        limit = 3 * largest + (32 << 20) if kind == "nvme" else whole / world + largest + (8 << 20)
        assert found["peak"] < limit, f"{found} {limit=} {whole=}"
    persists = (world - 1) * of_ranks[0]["persists"]
    assert total == whole + persists, f"{total} bytes were read, the file has {whole}, {persists} are read again"


def in_16_bits(rank: int, world: int, folder: str, dtype: torch.dtype) -> None:
    for family in ("t5", "llama"):
        model = on_meta(family)
        with deepspeed_c.init_inference(
            model, checkpoint=f"{folder}/{family}", dtype=dtype, zero=zero_of("shards", "")
        ) as engine:
            own = engine.module_state_dict()
            with torch.no_grad():
                got = engine(**feed(family)).logits
        with deepspeed_c.init_inference(make(family).eval(), dtype=dtype) as engine:
            state = engine.module_state_dict()
            with torch.no_grad():
                wanted = engine(**feed(family)).logits
            buffers = dict(engine.module.named_buffers())
        for name, tensor in state.items():
            assert own[name].dtype == tensor.dtype, f"{family} {name}: {own[name].dtype}, not {tensor.dtype}"
            assert torch.equal(own[name], tensor), f"{family} {name}: {own[name]} is not {tensor}"
        for name, buffer in model.named_buffers():
            assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), f"{family} {name}"
        kept = {name for name, tensor in own.items() if tensor.dtype == torch.float32}
        assert bool(kept) == (family == "t5" and dtype == torch.float16), f"{family}: {kept} are fp32"
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_cast_as_they_are_read(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    """T5 keeps ``wo`` in fp32 where weights are fp16."""
    for family in ("t5", "llama"):
        make(family).save_pretrained(tmp_path / family)
    run_ranks(world, in_16_bits, str(tmp_path), dtype, preload=PRELOAD)


def in_8_bits(rank: int, world: int, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    with (
        deepspeed_c.init_inference(
            on_meta("llama"), checkpoint=folder, dtype=torch.int8, zero=zero_of("shards", "")
        ) as engine,
        torch.no_grad(),
    ):
        got = engine(**feed("llama")).logits
        assert torch.int8 in {tensor.dtype for tensor in engine.module_state_dict().values()}
    with deepspeed_c.init_inference(make("llama").eval(), dtype=torch.int8) as engine, torch.no_grad():
        return got, engine(**feed("llama")).logits


def test_weights_of_8_bits_are_sharded_too(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    for got, wanted in run_ranks(2, in_8_bits, str(tmp_path), preload=PRELOAD):
        assert torch.equal(got, wanted), f"{got} {wanted}"


class Normed(torch.nn.Module):
    """Layers with buffers, weights without elements, one element, and an LSTM, which lists its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 131, num_layers=2)
        self.norm = torch.nn.BatchNorm1d(131)
        self.none = torch.nn.Parameter(torch.ones(0, 5))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lstm(x)[0]) * self.scale + self.none.sum()


def stream_normed(rank: int, world: int, kind: str, folder: str) -> torch.Tensor:
    with deepspeed_c.OnDevice(dtype=torch.float32, device="meta"):
        model = Normed()
    for param in model.lstm.parameters():
        param.requires_grad_(False)
    with (
        deepspeed_c.init_inference(
            model, checkpoint=f"{folder}/normed.safetensors", dtype=torch.float32, zero=zero_of(kind, folder)
        ) as engine,
        torch.no_grad(),
    ):
        return engine(torch.arange(12.0).view(4, 3))


@pytest.mark.parametrize("kind", ["shards", "nvme"])
def test_modules_with_buffers_and_with_lists_of_weights(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    model = Normed()
    model(torch.randn(9, 3))  # running statistics
    model.eval()
    with torch.no_grad():
        model.scale.fill_(3.5)
        wanted = model(torch.arange(12.0).view(4, 3))
    save_file(model.state_dict(), tmp_path / "normed.safetensors")
    for world in (1, 3):
        for got in run_ranks(world, stream_normed, kind, str(tmp_path), preload=PRELOAD):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def fail_on_rank_1(rank: int, world: int, kind: str, folder: str) -> tuple[str, str]:
    read, n_left = huggingface.fill_from_file, 5

    def fail(wanted: Read, file: int, offset: int, where: str) -> None:
        nonlocal n_left
        n_left -= 1
        if rank == 1 and n_left < 0:
            raise CheckpointError("the disk is gone", where=where, fix="buy another")
        read(wanted, file, offset, where)

    model = on_meta("gpt2")
    huggingface.fill_from_file = fail
    try:
        with pytest.raises(CheckpointError) as raised:
            deepspeed_c.init_inference(model, checkpoint=f"{folder}/gpt2", zero=zero_of(kind, folder))
    finally:
        huggingface.fill_from_file = read
    # The ranks are still in step: a second load of another model works.
    with (
        deepspeed_c.init_inference(
            on_meta("gpt2"), checkpoint=f"{folder}/gpt2", dtype=torch.float32, zero=zero_of(kind, folder)
        ) as engine,
        torch.no_grad(),
    ):
        torch.testing.assert_close(engine(**feed("gpt2")).logits, make("gpt2").eval()(**feed("gpt2")).logits)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["shards", "nvme"])
def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path: Path, kind: str) -> None:
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    first, second = run_ranks(2, fail_on_rank_1, kind, str(tmp_path), preload=PRELOAD)
    assert "rank 1 on" in first and "the disk is gone" in first, first
    assert "the disk is gone" in second, second


def no_folder(rank: int, world: int, folder: str) -> tuple[str, str]:
    model = on_meta("gpt2")
    with pytest.raises(ConfigError) as raised:
        deepspeed_c.init_inference(model, checkpoint=f"{folder}/gpt2", zero=zero_of("nvme", f"{folder}/file/below"))
    with pytest.raises(StateError) as unread:
        next(model.parameters()).sum()
    return str(raised.value), str(unread.value)


def test_a_model_that_no_rank_has_read_says_so(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    (tmp_path / "file").write_text("")
    for raised, unread in run_ranks(2, no_folder, str(tmp_path), preload=PRELOAD):
        assert "below cannot be used" in raised, raised
        assert "make the model anew" in unread, unread


def save_sharded(rank: int, world: int, folder: str, tp: int) -> None:
    zero = zero_of("shards", "")
    for family in ("gpt2", "llama_tied_shared"):
        with deepspeed_c.init_inference(
            make(family).eval(),
            dtype=torch.float32,
            zero=zero,
            tensor_parallel={"tp_size": tp},
            save_mp_checkpoint_path=f"{folder}/{family}",
        ):
            pass
        with deepspeed_c.init_inference(
            on_meta(family), checkpoint=f"{folder}/{family}", dtype=torch.float32, zero=zero
        ) as engine:
            state = make(family).state_dict()
            for name, tensor in engine.module_state_dict().items():
                assert torch.equal(tensor, state[name]), f"{family} {name}: {tensor} is not {state[name]}"


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)])
def test_what_sharded_ranks_save_is_read_again(tmp_path: Path, world: int, tp: int) -> None:
    run_ranks(world, save_sharded, str(tmp_path), tp, preload=PRELOAD)
