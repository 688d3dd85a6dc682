"""Rollouts by the model in training: greedy responses equal transformers', log-probabilities equal a plain forward's, in
any company; ranks with different numbers of prompts and tokens do not wait for one another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Chi2

import deepspeed_c
from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.ops import sample
from deepspeed_c.rollout import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)
from tests.ranks import run_ranks
from tests.toys import llama

transformers = pytest.importorskip("transformers")

VOCAB, END, PAD = 41, 7, 0
LENGTHS = (23, 5, 16, 1)
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)
# Of Zero: (stage, further settings). The last but one gathers each unit for each token.
CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (0, {}),
    "lease": (3, {}),
    "join": (3, {"stage3_max_live_parameters": 3000}),
    "joint": (3, {}),
}


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


def make_llama() -> Any:
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 128, "initializer_range": 0.3}
    return llama(2, **sizes, pad_token_id=PAD, eos_token_id=END)


def make_engine(cell: str = "whole", model: Any = None) -> Any:
    stage, more = CELLS[cell]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "comm": {"local": "shm", "zero_copy_gather": cell == "joint"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 30,
            **more,
        },
    }
    return deepspeed_c.initialize(model=make_llama() if model is None else model, config=config)[0]


def make_rollout(cell: str = "whole", **settings: Any) -> HybridEngineRollout:
    return HybridEngineRollout(make_engine(cell), TOKENIZER, HybridEngineRolloutConfig(**settings))


def request_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> RolloutRequest:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths, default=4)), PAD)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        ids[row, ids.shape[1] - n :] = torch.randint(8, VOCAB, (n,), generator=rng)
        mask[row, ids.shape[1] - n :] = 1
    return RolloutRequest(ids, mask)


def responses(batch: RolloutBatch) -> list[list[int]]:
    start = int(batch.response_start_idx[0]) if batch.batch_size else 0
    return [row[start:][is_token[start:] == 1].tolist() for row, is_token in zip(batch.input_ids, batch.attention_mask)]


def log_probs_alone(model: Any, batch: RolloutBatch, row: int, temperature: float = 1.0) -> torch.Tensor:
    """A row's log-probabilities, float64, by a forward without cache and padding."""
    tokens = batch.input_ids[row][batch.attention_mask[row] == 1]
    n_new = len(responses(batch)[row])
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, -n_new - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[-n_new:, None])[:, 0]


def greedy(request: RolloutRequest, n_new: int) -> list[list[int]]:
    """By transformers, each row alone."""
    model, found = make_llama().eval(), []
    for ids, mask in zip(request.prompt_ids, request.prompt_attention_mask):
        prompt = ids[mask == 1][None]
        found.append(model.generate(prompt, max_new_tokens=n_new, do_sample=False)[0, prompt.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("max_rows", [None, 1, 3])
def test_greedy_responses_are_those_of_each_row_alone(max_rows: int | None) -> None:
    request, plain = request_of(), make_llama().eval().double()
    rollout = make_rollout(max_rows=max_rows)
    batch = rollout.generate(request, SamplingConfig(20, temperature=0.0))
    assert responses(batch) == greedy(request, 20)
    assert batch.response_start_idx.tolist() == [23] * 4 and batch.batch_size == 4
    assert torch.equal(batch.input_ids[:, :23], request.prompt_ids)
    assert torch.equal(batch.attention_mask[:, :23], request.prompt_attention_mask)
    for row, response in enumerate(responses(batch)):
        found, expected = batch.logprobs[row, : len(response)].double(), log_probs_alone(plain, batch, row)
        assert torch.allclose(found, expected, rtol=0, atol=2e-5), (row, found - expected)
        assert not batch.logprobs[row, len(response) :].any()
        assert (batch.input_ids[row, 23 + len(response) :] == PAD).all()
    assert rollout.engine.module.training


def count_tokens(rollout: Any, request: RolloutRequest, sampling: SamplingConfig) -> tuple[int, RolloutBatch]:
    """(tokens that the model ran, the batch)."""
    n_read: list[int] = []
    embed = rollout.engine.module.model.embed_tokens
    hook = embed.register_forward_hook(lambda module, args, output: n_read.append(args[0].numel()))
    batch = rollout.generate(request, sampling, seed=3)
    hook.remove()
    return sum(n_read), batch


def test_samples_share_their_prompt_and_depend_on_their_seed_alone() -> None:
    request, sampling = request_of(), SamplingConfig(12, temperature=1.3, n_samples_per_prompt=5)
    found = []
    for max_rows in (None, 4, 7):
        rollout = make_rollout(max_rows=max_rows, enable_profiling=True)
        rollout._block_bytes = 1  # as if the model had been tried
        n_read, batch = count_tokens(rollout, request, sampling)
        n_new = sum(map(len, responses(batch)))
        assert rollout.get_last_profile()["num_prompt_tokens"] == sum(LENGTHS)
        # The first token of a response comes from its prompt, and the last one is not read.
        assert n_read == sum(LENGTHS) + n_new - 20, max_rows
        found.append(batch)
    assert all(responses(batch) == responses(found[0]) for batch in found)
    assert len({tuple(each) for each in responses(found[0])}) > 15
    ends = [response[-1] == END for response in responses(found[0])]
    assert 0 < sum(ends) < 20 and all(END not in response[:-1] for response in responses(found[0]))
    plain = make_llama().eval().double()
    for row, response in enumerate(responses(found[0])):
        expected = log_probs_alone(plain, found[0], row, 1.3)
        assert torch.allclose(found[0].logprobs[row, : len(response)].double(), expected, rtol=0, atol=2e-5), row
    other = make_rollout().generate(request, sampling, generator=torch.Generator().manual_seed(3))
    assert torch.equal(other.input_ids, found[0].input_ids)
    assert responses(make_rollout().generate(request, sampling, seed=4)) != responses(found[0])


def test_samples_are_those_of_a_loop_with_the_same_seeds() -> None:
    request = request_of((4, 9))
    sampling = SamplingConfig(8, temperature=0.8, top_k=20, top_p=0.9, n_samples_per_prompt=3)
    batch = make_rollout().generate(request, sampling, seed=11)
    seeds = torch.randint(0, 1 << 62, (6,), generator=torch.Generator().manual_seed(11))
    model, rules = make_llama().eval(), sample.Rules(temperature=0.8, top_k=20, top_p=0.9)
    for row, response in enumerate(responses(batch)):
        tokens = request.prompt_ids[row // 3][request.prompt_attention_mask[row // 3] == 1]
        for place, got in enumerate(response):
            with torch.no_grad():
                logits = model(tokens[None], use_cache=False).logits[0, -1:]
            word = sample.tokens(logits, [rules], seeds[row : row + 1], [place])[0]
            assert int(word) == got, (row, place)
            tokens = torch.cat([tokens, word])


def test_first_tokens_have_the_distribution_of_the_model() -> None:
    request, n = request_of((6,)), 4000
    batch = make_rollout().generate(request, SamplingConfig(1, temperature=1.5, n_samples_per_prompt=n), seed=5)
    with torch.no_grad():
        logits = make_llama().eval()(request.prompt_ids).logits[0, -1].double()
    expected = n * (logits / 1.5).softmax(-1)
    counts = torch.bincount(batch.input_ids[:, -1], minlength=VOCAB).double()
    is_rare = expected < 5
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    chi2 = float(((counts - expected).square() / expected.clamp(min=1e-9)).sum())
    # The 0.9999 quantile, by bisection of the distribution function.
    assert float(Chi2(torch.tensor(float(len(counts) - 1))).cdf(torch.tensor(chi2))) < 0.9999, chi2


# -- ranks ---------------------------------------------------------------------------------------------------------------------


def body(rank: int, world: int, cell: str) -> list[Any]:
    rollout, found = make_rollout(cell, max_rows=3), []
    sampling = SamplingConfig(9 + 5 * rank, temperature=0.0)
    for turn in range(3):
        request = request_of((LENGTHS, (), (3, 20))[(rank + turn) % 3], seed=turn)
        batch = rollout.generate(request, sampling)
        assert batch.batch_size == len(request.prompt_ids)
        found.append(responses(batch))
    tokens = torch.full((1, 5), 9)
    rollout.engine.backward(rollout.engine(input_ids=tokens, labels=tokens).loss)
    rollout.engine.step()
    rollout.sync_weights(1)
    rollout.engine.close()
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_ranks_have_different_prompts_and_ends(cell: str) -> None:
    for rank, found in enumerate(run_ranks(2, body, cell)):
        for turn, got in enumerate(found):
            request = request_of((LENGTHS, (), (3, 20))[(rank + turn) % 3], seed=turn)
            assert got == greedy(request, 9 + 5 * rank), (rank, turn)


def refusing_body(rank: int, world: int, cell: str) -> str:
    rollout, request = make_rollout(cell), request_of()
    if rank == 0:
        request.prompt_attention_mask[1, 20] = 0
    text = ""
    try:
        rollout.generate(request, SamplingConfig(4))
    except StateError as error:
        text = str(error)
    assert responses(rollout.generate(request_of(), SamplingConfig(4, temperature=0.0))) == greedy(request_of(), 4)
    return text


@pytest.mark.parametrize("cell", CELLS)
def test_a_refused_rank_does_not_leave_the_others_waiting(cell: str) -> None:
    mine, other = run_ranks(2, refusing_body, cell)
    assert "prompt 1 is padded in its middle, after place" in mine
    assert ("1 of 2 ranks have refused" in other) == (cell == "lease"), other


# -- bad input -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"max_new_tokens": 0}, "max_new_tokens: is 0"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt: is 0"),
        ({"temperature": float("nan")}, "temperature: is nan"),
        ({"temperature": float("inf")}, "temperature: is inf"),
        ({"top_p": 0.0}, "top_p: is 0.0"),
        ({"top_p": 1.5}, "top_p: is 1.5"),
        ({"top_k": -2}, "top_k: is -2"),
    ],
)
def test_sampling_out_of_its_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_rollout().generate(request_of(), SamplingConfig(**{"max_new_tokens": 4, **settings}))


def test_prompts_that_cannot_be_continued() -> None:
    rollout, sampling = make_rollout(), SamplingConfig(4)
    with pytest.raises(ModelError, match=r"prompt_ids is \(3,\)"):
        RolloutRequest(torch.ones(3), torch.ones(3))
    with pytest.raises(ModelError, match=r"prompt_attention_mask is \(2, 3\)"):
        RolloutRequest(torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3))
    request = request_of()
    for row, place, text in ((0, 4, "padded in its middle"), (2, 22, "padded on the right")):
        request = request_of()
        request.prompt_attention_mask[row, place] = 0
        with pytest.raises(StateError, match=f"prompt {row} is {text}, after place {place - 1} of 23"):
            rollout.generate(request, sampling)
    request = request_of()
    request.prompt_attention_mask[3] = 0
    with pytest.raises(StateError, match="prompt 3 has no token"):
        rollout.generate(request, sampling)
    for wrong in (-1, VOCAB):
        request = request_of()
        request.prompt_ids[1, 20] = wrong
        with pytest.raises(StateError, match=f"token 20 of prompt 1 is {wrong}, and the model has {VOCAB} words"):
            rollout.generate(request, sampling)
    request = request_of()
    request.prompt_ids[1, 0] = -100  # where there is no token
    rollout.generate(request, sampling)


def test_what_cannot_write() -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="neither an end token nor a padding token"):
        HybridEngineRollout(engine, SimpleNamespace(pad_token_id=None, eos_token_id=None))
    with pytest.raises(ModelError, match="does not continue prompts"):
        HybridEngineRollout(make_engine(model=torch.nn.Linear(2, 2)), TOKENIZER)
    with pytest.raises(ConfigError, match="'hybrid-engin' is no rollout engine\n.*write 'hybrid_engine', or"):
        build_rollout(RolloutConfig("hybrid-engin"), engine, TOKENIZER)
    with pytest.raises(ConfigError, match="needs student_engine and tokenizer"):
        build_rollout(RolloutConfig())
    assert isinstance(build_rollout(RolloutConfig(), student_engine=engine, tokenizer=TOKENIZER), HybridEngineRollout)


def test_a_tokenizer_without_padding_and_one_with_several_ends() -> None:
    request = request_of((3, 8))
    free = SimpleNamespace(pad_token_id=PAD, eos_token_id=None)
    sampling = SamplingConfig(30, temperature=0.0)
    plain = responses(HybridEngineRollout(make_engine(), free).generate(request, sampling))
    assert [len(each) for each in plain] == [30, 30]
    ends = [plain[0][4], plain[1][9]]
    batch = HybridEngineRollout(make_engine(), SimpleNamespace(eos_token_id=ends)).generate(request, sampling)
    cut = [next(i for i, word in enumerate(each) if word in ends) + 1 for each in plain]
    assert responses(batch) == [each[:n] for each, n in zip(plain, cut, strict=True)]
    assert (batch.input_ids[batch.attention_mask[:, -1] == 0, -1] == ends[0]).all()
