"""The hybrid engine: rounds of reinforcement learning in the manner of DeepSpeed-Chat's third step, with tokens of a
plain model, and prompts that are refused before any collective."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.engine.generate import GenerationCost
from deepspeed_c.engine.hybrid import DeepSpeedHybridEngine, RoundTimes
from deepspeed_c.engine.prompts import check_padding
from deepspeed_c.errors import ConfigError, FeatureError, StateError
from deepspeed_c.pipe import LayerSpec, PipelineModule
from tests import training
from tests.log_lines import LogLines
from tests.ranks import on_ranks, run_ranks
from tests.toys import twin_of

transformers = pytest.importorskip("transformers")

VOCAB, PAD, LENGTH = 53, 0, 13


def opt(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            ffn_dim=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=24,
            dropout=0.0,
            pad_token_id=PAD,
            init_std=0.3,
        )
    )


class Critic(torch.nn.Module):
    """A number for each place of a sequence."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = opt(seed).model
        self.value = torch.nn.Linear(24, 1, bias=False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.value(self.body(input_ids=tokens, attention_mask=mask).last_hidden_state)[..., 0]


def settings(stage: int, *, hybrid: dict[str, Any] | None = None, trains: bool = True, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = training.config(
        stage, None, zero={"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 30}, rows=2, **more
    )
    if trains:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 5e-3}}
    if hybrid is not None:
        config["hybrid_engine"] = {"enabled": True, **hybrid}
    return config


def make_actor(stage: int, **more: Any) -> Any:
    hybrid = {
        "max_out_tokens": LENGTH, "inference_tp_size": 1, "release_inference_cache": True, "pin_parameters": False,
    }  # fmt: skip
    return deepspeed_c.initialize(model=opt(1), config=settings(stage, hybrid=hybrid, **more))[0]


def prompts_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, of 3 and 5 tokens, padded on the left with token 0."""
    prompts = torch.tensor([[PAD, PAD, 7 + rank, 11, 3], [5, 9, 2, 31 + rank, 8]])
    return prompts, (prompts != PAD).long()


def write(model: Any, prompts: torch.Tensor, mask: torch.Tensor | None, **more: Any) -> torch.Tensor:
    return model.generate(
        input_ids=prompts, attention_mask=mask, max_length=LENGTH, min_length=LENGTH, do_sample=False, **more
    )


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[batch, tokens - 1]: of each token after the first, given those before it."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


# -- rounds of proximal policy optimization ------------------------------------------------------------------------------------


def make_experience(actor: Any, reference: Any, critic: Any, reward: Any, rank: int) -> dict[str, torch.Tensor]:
    prompts, mask = prompts_of(rank)
    actor.eval()
    critic.eval()
    with torch.no_grad():
        tokens = write(actor.module, prompts, mask, synced_gpus=True)
    actor.train()
    critic.train()
    whole = torch.cat([mask, torch.ones_like(tokens[:, mask.shape[1] :])], 1)
    with torch.no_grad():
        old = log_probs(actor(input_ids=tokens, attention_mask=whole).logits, tokens)
        anchor = log_probs(reference(input_ids=tokens, attention_mask=whole).logits, tokens)
        values = critic(tokens, whole)
        score = reward(tokens, whole)[:, -1]
    return {"tokens": tokens, "mask": whole, "old": old, "anchor": anchor, "values": values, "score": score}


def train_on(actor: Any, critic: Any, exp: dict[str, torch.Tensor]) -> tuple[float, float]:
    tokens, mask = exp["tokens"], exp["mask"]
    gain = exp["score"][:, None] - 0.1 * (exp["old"] - exp["anchor"])
    advantage = gain - exp["values"][:, :-1]
    ratio = (log_probs(actor(input_ids=tokens, attention_mask=mask).logits, tokens) - exp["old"]).exp()
    loss = training.update(actor, -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
    return loss, training.update(critic, (critic(tokens, mask)[:, :-1] - gain).square().mean())


def rounds_body(rank: int, world: int, stage: int, joint: bool) -> Any:
    comm = {"comm": {"local": "shm", "zero_copy_gather": joint}}
    actor = make_actor(stage, **comm)
    assert type(actor) is DeepSpeedHybridEngine and isinstance(actor, deepspeed_c.DeepSpeedEngine)
    reference = deepspeed_c.initialize(model=opt(1), config=settings(stage, trains=False, **comm))[0]
    critic = deepspeed_c.initialize(model=Critic(2), config=settings(stage, **comm))[0]
    reward = deepspeed_c.initialize(model=Critic(3), config=settings(stage, trains=False, **comm))[0]
    reference.eval()
    reward.eval()
    losses, written = [], []
    for _ in range(3):
        twin = twin_of(actor, opt(1))
        exp = make_experience(actor, reference, critic, reward, rank)
        assert torch.equal(exp["tokens"], write(twin, *prompts_of(rank)))
        written.append(exp["tokens"].tolist())
        losses.append(train_on(actor, critic, exp))
        assert actor.was_step_applied() and critic.was_step_applied()
    for engine in (actor, reference, critic, reward):
        engine.close()
    return losses, written


def test_rounds_at_each_stage_write_the_tokens_of_a_plain_model() -> None:
    runs = [run_ranks(2, rounds_body, stage, joint) for stage, joint in ((0, False), (2, False), (3, False), (3, True))]
    losses, written = zip(*runs[0], strict=True)
    assert written[0] != written[1] and len({str(tokens) for tokens in written[0]}) > 1
    for run in runs[1:]:
        for (found, tokens), want, want_tokens in zip(run, losses, written, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-4, atol=1e-6)
            assert tokens == want_tokens


# -- prompts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_prompts_that_cannot_be_continued_are_refused_before_a_collective(rank: int, world: int, stage: int) -> None:
    with make_actor(stage) as actor:
        twin = twin_of(actor, opt(1))
        actor.eval()
        n_collectives, n_refusals = actor._comm.ledger.last, 8
        prompts, mask = prompts_of(rank)
        hole = mask.clone()
        hole[1, 2] = 0
        too_long = torch.full((1, LENGTH + 1), 4)
        for model in (actor, actor.module):
            with pytest.raises(StateError, match=f"prompt of {LENGTH + 1} tokens.*max_out_tokens, which is {LENGTH}"):
                model.generate(too_long, max_new_tokens=1)
            with pytest.raises(StateError, match="prompt 0 is padded on the right, after place 2 of 5"):
                write(model, prompts.flip(1), mask.flip(1))
            with pytest.raises(StateError, match="prompt 0 is padded on the right"):
                write(model, prompts.flip(1), None)
            with pytest.raises(StateError, match="prompt 1 has a hole after place 1 of 5"):
                model.generate(inputs=prompts, attention_mask=hole)
        # Where a lease would gather, ranks tell each other that they have refused.
        assert actor._comm.ledger.last == n_collectives + (n_refusals if stage == 3 else 0)
        if stage == 3:
            with pytest.raises(StateError, match="longer" if rank == 0 else "1 of 2 ranks have refused to generate"):
                actor.module.generate(too_long if rank == 0 else prompts, max_new_tokens=1)
        want = write(twin, prompts, mask)
        assert torch.equal(write(actor.module, prompts, mask), want)
        assert torch.equal(write(actor, prompts, None), want)  # the padding of token 0 is inferred
        # Exactly the limit, one token more, and a rank without prompts
        assert actor.generate(too_long[:, : LENGTH - 2], max_new_tokens=2, min_new_tokens=2).shape == (1, LENGTH)
        with pytest.raises(StateError, match=f"{LENGTH - 1} tokens and 2 new ones are longer than max_out_tokens"):
            actor.generate(too_long[:, : LENGTH - 1], max_new_tokens=2)
        assert write(actor.module, prompts[:0], mask[:0]).shape == (0, 5)
        actor.train()


def test_which_padding_is_refused() -> None:
    model = opt(1)
    rows = torch.tensor([[4, PAD, 5], [PAD, PAD, PAD]])
    check_padding(model, (rows,), {})  # token 0 within a prompt; a row of padding
    check_padding(model, (rows.flip(1)[:, :0],), {})
    check_padding(model, (rows.float(),), {})
    check_padding(model, (), {"inputs_embeds": rows.float()})
    check_padding(model, (rows,), {"attention_mask": torch.ones(2, 1, 3, 3)})
    ended = torch.tensor([[4, 5, PAD]])
    with pytest.raises(StateError, match="right"):
        check_padding(model, (ended,), {})
    with pytest.raises(StateError, match="right"):
        check_padding(
            model, (), {"input_ids": ended, "generation_config": transformers.GenerationConfig(pad_token_id=PAD)}
        )
    for none in ({"pad_token_id": None}, {"eos_token_id": PAD}, {"eos_token_id": [2, PAD]}, {"pad_token_id": 9}):
        check_padding(model, (ended,), none)
    check_padding(model, (ended,), {"attention_mask": torch.ones(1, 3)})
    model.config.is_encoder_decoder = True
    check_padding(model, (ended,), {"attention_mask": torch.tensor([[1, 0, 0]])})


# -- where the time goes -------------------------------------------------------------------------------------------------------


class Story:
    """A clock and a cost of generation that a test moves on."""

    def __init__(self) -> None:
        self.now, self.cost = 100.0, GenerationCost()
        self.times = RoundTimes(lambda: self.cost, 3, lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def generate(self, n_prompts: int, lease_s: float, total_s: float) -> None:
        self.now += total_s
        self.cost = self.cost.plus(GenerationCost(n_prompts, lease_s, total_s))


def test_times_of_rounds() -> None:
    story = Story()
    times = story.times
    times.switch(is_training=True)  # before the first round: neither it nor this generation counts
    story.generate(9, 1.0, 2.0)
    times.end_step()
    assert times.lines() == []

    times.switch(is_training=False)
    story.generate(4, 1.0, 3.0)
    story.wait(1.0)
    times.switch(is_training=True)
    story.wait(2.0)
    times.end_step()
    story.wait(1.0)
    [line] = times.lines()
    assert line == (
        "E2E latency=7.00 s, gather=1.00 s (14.3 %), generate=2.00 s (28.6 %), training=3.00 s (42.9 %),"
        " other=1.00 s (14.3 %), samples/s=1.714 (mean 1.714)"
    )
    story.wait(1.0)
    times.end_step()
    assert times.lines() == []  # nothing was generated; the time goes on

    story.generate(2, 0.0, 4.0)  # within training, as without gradients
    story.wait(1.0)
    times.end_step()
    story.wait(2.0)  # after the last step
    times.switch(is_training=False)
    story.generate(2, 0.0, 2.0)
    [line] = times.lines()
    assert line == (
        "E2E latency=10.00 s, gather=0.00 s (0.0 %), generate=6.00 s (60.0 %), training=2.00 s (20.0 %),"
        " other=2.00 s (20.0 %), samples/s=1.2 (mean 1.412)"
    )


def said_body(rank: int, world: int) -> list[str]:
    with LogLines() as log, make_actor(3, steps_per_print=2, gradient_accumulation_steps=2) as actor:
        for _ in range(4):
            for _ in range(2):
                actor.eval()
                with torch.no_grad():
                    tokens = write(actor.module, *prompts_of(rank))
                actor.train()
                training.step(actor, input_ids=tokens, labels=tokens)
        assert actor._generation.cost.n_prompts == 16
    return [line for line in log.lines if line.startswith(("step=", "E2E"))]


def test_a_line_of_latencies_follows_the_line_of_a_step() -> None:
    first, second = run_ranks(2, said_body)
    assert [line.split("=")[0] for line in first] == ["step", "E2E latency"] * 2 and second == [], (first, second)
    for line in first[1::2]:
        shares = [float(share) for share in re.findall(r"\(([\d.-]+) %\)", line)]
        assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=0.3) and min(shares[1:3]) > 0, line


# -- LoRA ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_switches_leave_the_weights_below_lora_as_they_are(rank: int, world: int, stage: int) -> None:
    import peft

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False, task_type="CAUSAL_LM")
        torch.manual_seed(4)
        return peft.get_peft_model(opt(1).to(torch.bfloat16), config, autocast_adapter_dtype=False)

    hybrid = {"max_out_tokens": LENGTH}
    config = settings(stage, hybrid=hybrid, bf16={"enabled": True})
    with deepspeed_c.initialize(model=adapted(), config=config)[0] as actor:
        base = {name: value.clone() for name, value in actor.module_state_dict().items() if "lora_" not in name}
        twin, prompts, mask = adapted().eval(), *prompts_of(rank)
        for _ in range(3):
            twin.load_state_dict({name: value.clone() for name, value in actor.module_state_dict().items()})
            want = write(twin, prompts, mask)
            actor.eval()
            actor.fuse_lora_weight()
            assert not actor.is_lora_fused
            actor.retake_inference_cache()
            for unfuse in (actor.unfuse_lora_weight, actor.unfuse_lora_weight_non_pinned):
                got = write(actor.module, prompts, mask)
                assert torch.equal(got, want)
                unfuse()
            actor.train()
            training.step(actor, input_ids=got, labels=got)
            assert actor.was_step_applied()
        after = actor.module_state_dict()
        assert all(torch.equal(after[name], value) for name, value in base.items()) and len(base) > 30


# -- what a configuration may ask for ------------------------------------------------------------------------------------------


@on_ranks(1)
def test_a_configuration_beyond_this_version_is_refused_by_name(rank: int, world: int) -> None:
    for key, value in (("enable_cuda_graph", True),):
        with pytest.raises(ConfigError, match=f"hybrid_engine.{key}"):
            deepspeed_c.initialize(model=opt(1), config=settings(0, hybrid={key: value}))
        off = settings(0, hybrid={key: value, "enabled": False})
        engine = deepspeed_c.initialize(model=opt(1), config=off)[0]
        assert type(engine) is deepspeed_c.DeepSpeedEngine
        engine.close()
    pipeline = PipelineModule([LayerSpec(torch.nn.Linear, 2, 2)], num_stages=1, loss_fn=torch.nn.MSELoss())
    with pytest.raises(FeatureError, match="does not generate"):
        deepspeed_c.initialize(model=pipeline, config=settings(0, hybrid={}))
