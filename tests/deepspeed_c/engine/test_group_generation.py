"""Groups of ranks that generate together (``hybrid_engine.inference_tp_size``): the tokens of a plain model, from the
engine's own weights where these are whole, and from parts of them where they are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.engine.hybrid import DeepSpeedHybridEngine
from deepspeed_c.errors import ConfigError, DeepSpeedCError, FeatureError, ModelError, RankMismatchError, StateError
from deepspeed_c.moe.layer import MoE
from deepspeed_c.zero import GatheredParameters
from tests.cells import full
from tests.ranks import on_ranks, run_ranks
from tests.toys import Chain, llama, twin_of
from tests.training import step

transformers = pytest.importorskip("transformers")

VOCAB = 53
CELLS = [(0, False), pytest.param(2, False, marks=full), pytest.param(3, False, marks=full), (3, True)]


def make_llama(**more: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    usual = {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None, "initializer_range": 0.3}
    return llama(1, **{**sizes, **usual, **more})


def configuration(stage: int, joint: bool = False, n_together: int = 2, **more: Any) -> dict[str, Any]:
    zero = {
        "stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 40, **more.pop("zero", {}),
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "comm": {"local": "shm", "zero_copy_gather": joint}, "zero_optimization": zero,
        "hybrid_engine": {"enabled": True, "inference_tp_size": n_together, "tp_gather_partition_size": 2}, **more,
    }  # fmt: skip


def make(stage: int, joint: bool = False, n_together: int = 2, **more: Any) -> Any:
    engine = deepspeed_c.initialize(model=make_llama(), config=configuration(stage, joint, n_together, **more))[0]
    assert type(engine) is DeepSpeedHybridEngine
    return engine


def train(engine: Any, tokens: torch.Tensor) -> float:
    engine.train()
    return step(engine, input_ids=tokens, labels=tokens)


def prompt_of(rank: int) -> torch.Tensor:
    return torch.tensor([[3 + rank, 7, 11, 2, 5]])[:, : 5 - rank % 2].repeat(1 + rank % 2, 1)


def write(model: Any, prompt: torch.Tensor, n_tokens: int, **more: Any) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=n_tokens, do_sample=False, **more)


def copy_of(engine: Any) -> torch.nn.Module:
    return engine._edits["group generation"]._copy.module


# -- tokens and training -------------------------------------------------------------------------------------------------------


def rounds_body(rank: int, world: int, stage: int, joint: bool, n_together: int, more: dict[str, Any]) -> Any:
    with make(stage, joint, n_together, **more) as engine:
        losses = []
        for turn in range(3):
            twin = twin_of(engine, make_llama())
            engine.eval()
            n_tokens = 3 + 5 * ((rank + turn) % 2)
            want = write(twin, prompt_of(rank), n_tokens)
            for model in (engine, engine.module):
                got = write(model, prompt_of(rank), n_tokens, synced_gpus=True)
                assert torch.equal(got, want), (got, want)
            losses.append(train(engine, got))
        # Between generations the copy holds nothing.
        assert n_together == 1 or all(param.is_meta for param in copy_of(engine).parameters())
    return losses


@pytest.mark.parametrize(("stage", "joint"), CELLS)
def test_groups_write_the_tokens_of_a_plain_model_and_leave_training_as_it_is(stage: int, joint: bool) -> None:
    together = run_ranks(4, rounds_body, stage, joint, 2, {})
    alone = run_ranks(4, rounds_body, stage, joint, 1, {})
    assert together == alone and len(set(map(str, alone))) > 1, (together, alone)


def test_one_group_of_all_ranks_with_weights_and_states_on_the_host() -> None:
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    runs = [run_ranks(3, rounds_body, 3, False, n_together, {"zero": zero}) for n_together in (3, 1)]
    assert runs[0] == runs[1]


# -- where weights lie ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "joint"), [(0, False), (2, False), (3, True)])
@on_ranks(2)
def test_whole_weights_are_read_where_they_lie(rank: int, world: int, stage: int, joint: bool) -> None:
    with make(stage, joint) as engine:
        engine.eval()
        spans: list[tuple[int, int]] = []
        parts: list[tuple[str, int]] = []

        def look(module: torch.nn.Module, args: Any) -> None:
            spans[:] = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in engine.module.parameters()]
            parts[:] = [(name, p.data_ptr()) for name, p in copy_of(engine).named_parameters() if p.numel()]

        handle = copy_of(engine).register_forward_pre_hook(look)
        write(engine.module, prompt_of(rank), 2)
        handle.remove()
        outside = [name for name, at in parts if not any(begin <= at < end for begin, end in spans)]
        assert not outside and len(parts) > 20, outside


@on_ranks(2)
def test_of_shards_each_rank_keeps_its_parts_until_training_goes_on(rank: int, world: int) -> None:
    with make(3) as engine:
        fetcher = engine._fetcher
        n_units, n_elems = len(fetcher.groups), sum(group.numel for group in fetcher.groups)
        engine.eval()
        fetcher.stats.max_live_elems = 0
        n_before = fetcher.stats.n_gathers
        write(engine.module, prompt_of(rank), 3)
        write(engine.module, prompt_of(rank), 6)
        assert fetcher.stats.n_gathers - n_before == n_units > 4, "once for both calls"
        most = max(a.numel + b.numel for a, b in zip(fetcher.groups, fetcher.groups[1:]))
        assert 0 < fetcher.stats.max_live_elems <= most < n_elems / 2 and fetcher.stats.live_elems == 0
        held = sum(param.numel() for param in copy_of(engine).parameters())
        assert not any(param.is_meta for param in copy_of(engine).parameters()) and held < 0.65 * n_elems, (
            held,
            n_elems,
        )
        # An edit of the weights is seen by the next call.
        head = engine.module.lm_head.weight
        with GatheredParameters([head], modifier_rank=0), torch.no_grad():
            if rank == 0:
                head.neg_()
        twin = twin_of(engine, make_llama())
        assert torch.equal(write(engine.module, prompt_of(rank), 6), write(twin, prompt_of(rank), 6))
        engine.train()
        assert all(param.is_meta for param in copy_of(engine).parameters())


def sampled_body(rank: int, world: int) -> Any:
    with make(2) as engine:
        engine.eval()
        torch.manual_seed(7 + rank)
        torch.rand(rank)
        before = torch.get_rng_state()
        tokens = engine.module.generate(torch.full((1, 2), 5), max_new_tokens=9, do_sample=True)
        # A rank whose generator differs from rank 0's gets its own state back.
        assert rank == 0 or torch.equal(before, torch.get_rng_state())
    return tokens.tolist()


def test_sampled_rows_of_equal_prompts_differ() -> None:
    first, second = run_ranks(2, sampled_body)
    assert first != second and len(first[0]) == len(second[0]) == 11, (first, second)


def adapters_body(rank: int, world: int) -> None:
    """A program changes the model between two generations."""
    import peft

    def adapted() -> Any:
        torch.manual_seed(8)
        lora = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        made = peft.get_peft_model(make_llama(), lora)
        made.add_adapter("other", lora)
        return made

    with deepspeed_c.initialize(model=adapted(), config=configuration(2))[0] as engine:
        twin = adapted().eval()
        twin.load_state_dict({name: value.clone() for name, value in engine.module_state_dict().items()})
        engine.eval()
        found, end = [], torch.tensor(0)
        for change in (
            lambda model: None,
            lambda model: model.set_adapter("other"),
            lambda model: model.base_model.disable_adapter_layers(),
            lambda model: model.base_model.enable_adapter_layers(),
            lambda model: model.merge_adapter(),
            lambda model: model.unmerge_adapter(),
            lambda model: setattr(model.generation_config, "eos_token_id", end.item()),
        ):
            end.fill_(found[-1][0][8] if found else 0)
            torch.distributed.broadcast(end, 0)
            change(engine.module)
            change(twin)
            got, want = (write(model, prompt_of(rank), 9) for model in (engine.module, twin))
            assert torch.equal(got, want), (len(found), got, want)
            found.append(got.tolist())
        # Either adapter, none, and the end of sequences, which rank 0 has met.
        assert len(set(map(str, found))) == 4 or rank == 1, found
        engine.module.generation_config.eos_token_id = 3 + rank
        with pytest.raises(RankMismatchError, match="eos_token_id"):
            write(engine.module, prompt_of(rank), 3)


def test_adapters_that_are_chosen_later_and_merged_ones_are_generated_with() -> None:
    pytest.importorskip("peft")
    run_ranks(2, adapters_body)


# -- errors --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_the_mistake_of_one_rank_is_an_error_on_all_that_wait_for_it(rank: int, world: int, stage: int) -> None:
    """Rank 2 alone makes each of the mistakes. All ranks have an error then, and the next call works."""
    with make(stage) as engine:
        engine.eval()
        twin = twin_of(engine, make_llama())
        good, long, right = prompt_of(rank), torch.full((1, 513), 4), torch.tensor([[5, 6, 0]])
        for wrong, text in (
            (long, "513 tokens is longer"),
            (right, "padded on the right"),
            (good.float(), "token numbers"),
        ):
            with pytest.raises(DeepSpeedCError, match=text) as raised:
                if rank < 2 and stage < 3:  # the other group neither waits nor hears of it
                    write(engine.module, good, 2)
                    raise StateError(text, where="", fix="")
                write(engine.module, wrong if rank == 2 else good, 2)
            if rank == 3:
                assert "rank 2, with which this rank generates, has refused" in str(raised.value)
        with pytest.raises(DeepSpeedCError, match="top_k" if rank > 1 or stage == 3 else "fine"):
            write(engine.module, good, 2, top_k=5 + (rank == 2))
            raise StateError("fine", where="", fix="")
        assert torch.equal(write(engine.module, good, 4), write(twin, good, 4))


@on_ranks(2)
def test_ranks_and_models_that_cannot_be_divided_are_refused_by_name(rank: int, world: int) -> None:
    t5 = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}

    def refuses(error: type[Exception], text: str, model: Any, **more: Any) -> None:
        with pytest.raises(error, match=text) as raised:
            deepspeed_c.initialize(model=model, config=configuration(2, **more))
        assert "hybrid_engine.inference_tp_size" in str(raised.value), raised.value

    refuses(ConfigError, "groups of 3", make_llama(), n_together=3)
    refuses(ModelError, "no model of transformers", torch.nn.Linear(2, 2))
    refuses(FeatureError, "has an encoder", transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)))
    mixed = Chain(model=make_llama(), experts=MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=2))
    refuses(FeatureError, "expert of this rank alone", mixed)
    refuses(FeatureError, "divided anew", make_llama(), tensor_parallel={"autotp_size": 2})
