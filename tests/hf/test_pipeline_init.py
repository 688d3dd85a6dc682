"""``from_transformers`` within ``zero.Init``: no rank holds more than its part of its stage, and a run has the same
bits as without it."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.hf.stack import on_ranks
from tests.hf.test_pipeline import LLAMA, N_BATCHES, STEPS, adapted, bare, batches_of, config_of, engine_of, model_of


def build(source: str, name: str, folder: str, is_sharded: bool, **options: Any) -> Any:
    import deepspeed_c
    from deepspeed_c.pipe import from_transformers

    with deepspeed_c.zero.Init() if is_sharded else nullcontext():
        if source == "folder":
            return from_transformers(folder, 2, **options)
        if source == "configuration":
            return from_transformers(config_of(name), 2, dtype=torch.float32, **options)
        if source == "model":
            return from_transformers(outside(name), 2, **options)
        return from_transformers(model_of(name), 2, **options)


def outside(name: str) -> Any:
    """A model that is not sharded, though a ``zero.Init`` may be open."""
    from deepspeed_c.zero.weights.init import suspended

    with suspended():
        return adapted("llama") if name == "llama with adapters" else model_of(name)


def adapters_body(rank: int, world: int) -> Any:
    """(which weights are trained and sharded, losses), without and with ``zero.Init``."""
    from deepspeed_c.zero.weights.param import state_of
    from tests.training import config
    from tests.training import engine_of as engine_with

    settings = config(2, rows=2, accumulate=N_BATCHES, gradient_clipping=0.0)
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(5)
        module = build("model", "llama with adapters", "", is_sharded)
        kinds = {name: (p.requires_grad, p.dtype) for name, p in module.named_parameters()}
        assert all((state_of(p) is not None) is is_sharded for p in module.parameters())
        trained = [p for p in module.parameters() if p.requires_grad]
        with engine_with(module, settings, model_parameters=trained) as engine:
            data_rank = module.mpu().get_data_parallel_rank()
            found.append((kinds, [float(engine.train_batch(iter(batches_of(step, data_rank)))) for step in range(2)]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_adapters_are_trained_on_frozen_shards(world):
    for rank, (plain, sharded) in enumerate(on_ranks(world, adapters_body)):
        assert {is_trained for is_trained, _ in plain[0].values()} == {True, False}
        assert sharded == plain, f"rank {rank}: {sharded} with zero.Init, {plain} without"


def body(
    rank: int, world: int, source: str, name: str, stage: int, options: dict[str, Any], more: dict[str, Any], at: str
) -> Any:
    """(losses, weights, the part of the stage that this rank held before the run), without and with ``zero.Init``."""
    from deepspeed_c.zero import GatheredParameters
    from deepspeed_c.zero.weights.param import state_of

    found = []
    for is_sharded in (False, True):
        module = build(source, name, os.path.join(at, "from"), is_sharded, **options)
        states = [state for param in module.parameters() if (state := state_of(param)) is not None]
        assert len(states) == (len(list(module.parameters())) if is_sharded else 0)
        ranks = {tuple(state.comm.global_ranks) for state in states}
        held = (ranks, sum(state.piece.numel() for state in states), sum(state.numel for state in states))
        if is_sharded:  # before there is an engine
            module.save_pretrained(os.path.join(at, "before"), max_shard_size="50KB")
        with engine_of(module, stage, **more) as engine:
            data_rank = module.mpu().get_data_parallel_rank()
            losses = [float(engine.train_batch(iter(batches_of(step, data_rank)))) for step in range(STEPS)]
            assert engine.save_16bit_model(os.path.join(at, str(is_sharded)), max_shard_size="50KB")
            engine.save_checkpoint(os.path.join(at, "checkpoint"), tag="two")
            engine.load_checkpoint(os.path.join(at, "checkpoint"))
            with GatheredParameters(module.parameters()):
                weights = {bare(key): p.detach().clone() for key, p in module.named_parameters()}
            found.append((losses, weights, held))
    return found


@pytest.mark.parametrize(
    ("world", "source", "name", "stage", "options", "more"),
    [
        (2, "folder", "llama", 2, {}, {}),
        (2, "configuration", "llama tied", 0, {"schedule": "zb_v"}, {}),
        (4, "configuration", "gpt2", 1, {}, {}),
        (4, "folder", "llama tied", 2, {}, {}),
        (2, "model", "gpt2", 2, {}, {}),
        (4, "sharded model", "llama tied", 2, {}, {}),
        (2, "sharded model", "mixtral", 1, {}, {}),
        (4, "folder", "llama", 1, {}, {"tensor_parallel": {"autotp_size": 2}}),
        (2, "folder", "llama", 3, {}, {}),
        (4, "configuration", "llama tied", 3, {}, {}),
    ],
)
def test_a_run_has_the_same_bits(tmp_path, world, source, name, stage, options, more):
    from transformers import AutoModelForCausalLM

    model_of(name).save_pretrained(tmp_path / "from")
    outcome = on_ranks(world, body, source, name, stage, options, more, str(tmp_path))
    copies = world // 2
    for rank, ((plain, wanted, _), (losses, weights, (ranks, n_own, n_all))) in enumerate(outcome):
        assert losses == plain, f"rank {rank}: {losses} with zero.Init, {plain} without"
        assert weights.keys() == wanted.keys()
        for key, value in weights.items():
            assert torch.equal(value, wanted[key]), f"rank {rank}, {key}: {value} and {wanted[key]}"
        assert ranks == {tuple(range(rank // copies * copies, (rank // copies + 1) * copies))}
        assert n_own <= -(-n_all // copies) + len(weights), f"rank {rank}: {n_own} of {n_all}"
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / at).state_dict() for at in ("False", "True")]
    for key, value in saved[0].items():
        assert torch.equal(value, saved[1][key]), key
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "before").state_dict()
    if source != "configuration":
        for key, value in AutoModelForCausalLM.from_pretrained(tmp_path / "from").state_dict().items():
            assert torch.equal(value, before[key]), key


M_MMAP_THRESHOLD = -3  # of mallopt
# Eight layers of 21 MB each.
LAYER = 4 * (3 * 768 * 768 + 3 * 768 * 1536)
READER = 16 << 20  # buffers of the files' reader
SLACK = 12 << 20
LARGE = {**LLAMA, "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 8}


def large_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", **{**LARGE, "num_attention_heads": 8, "num_key_value_heads": 4})


def grown(rank: int, world: int, source: str, folder: str) -> tuple[int, int, int]:
    """(bytes that the peak of the resident memory rises by, bytes of this rank's parts, bytes of its stage)."""
    import deepspeed_c
    from deepspeed_c.accelerator import get_accelerator
    from deepspeed_c.pipe import from_transformers
    from deepspeed_c.zero.weights.param import state_of

    def make(config: Any) -> Any:
        with deepspeed_c.zero.Init():
            return from_transformers(config, 2, **({"dtype": torch.float32} if source == "configuration" else {}))

    # Each tensor has memory of its own, which goes back when it is freed: holes of the heap must not count.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    # Imports, connections and threads must not count below.
    first = os.path.join(folder, "small") if source == "folder" else config_of("llama")
    make(first)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    accelerator = get_accelerator()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    module = make(os.path.join(folder, "large") if source == "folder" else large_config())
    rise = accelerator.max_memory_allocated() - before
    states = [state_of(param) for param in module.parameters()]
    return rise, 4 * sum(state.piece.numel() for state in states), 4 * sum(state.numel for state in states)


@pytest.mark.parametrize("source", ["folder", "configuration"])
def test_a_rank_never_holds_its_whole_stage(tmp_path, source):
    from transformers import AutoModelForCausalLM

    from deepspeed_c.accelerator import get_accelerator
    from deepspeed_c.errors import StateError

    try:
        get_accelerator().reset_peak_memory_stats()
    except StateError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    model_of("llama").save_pretrained(tmp_path / "small")
    if source == "folder":
        AutoModelForCausalLM.from_config(large_config(), dtype=torch.float32).save_pretrained(tmp_path / "large")
    for rank, (rise, n_own, n_stage) in enumerate(on_ranks(4, grown, source, str(tmp_path))):
        allowed = n_own + (READER if source == "folder" else LAYER) + SLACK
        text = f"rank {rank}, {source}: {rise / 1e6:.1f} MB, of parts {n_own / 1e6:.1f}, stage {n_stage / 1e6:.1f}"
        print(text)
        assert n_own <= n_stage / 2 + 4096 and allowed < n_stage, text
        assert rise <= allowed, f"{text}; allowed are {allowed / 1e6:.1f}"
