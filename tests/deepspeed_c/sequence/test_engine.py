"""Engines whose sequences are cut over ranks, without transformers. After SGD the weights equal those of one plain
process, for all ways to set the axis. Checkpoints between arrangements, dropout, and calls of backward are tested
too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import deepspeed_c
from deepspeed_c.errors import BackwardError, CommError, ConfigError, StateError
from deepspeed_c.sequence import parallel_state
from deepspeed_c.sequence.layer import DistributedAttention
from deepspeed_c.utils import groups
from tests.ranks import on_ranks, run_ranks
from tests.training import config, update

TOKENS, BATCH, WIDTH, HEADS = 8, 2, 8, 4
STEPS, RATE = 3, 0.3


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over [batch, tokens, heads, width]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Toy(torch.nn.Module):
    """Two layers of attention and a product. The loss is a mean over the labels that count."""

    def __init__(self, group: Any = None, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.attention = attend if group is None else DistributedAttention(attend, group, 2, 1)
        self.dropout = torch.nn.Dropout(dropout)
        self.dropped: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.to(self.out.weight.dtype)
        for mix in self.mix:
            q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in mix(x).chunk(3, -1))
            x = x + self.attention(q, k, v).flatten(2)
        self.dropped = self.dropout(torch.ones_like(x))
        logits = self.out(x * self.dropped)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(step: int, micro: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + step + 10 * micro + 100 * data_rank)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
    labels = torch.randint(0, WIDTH, (BATCH, TOKENS), generator=generator)
    labels[:, : 3 + data_rank] = -100  # all micro-batches of a rank have as many; ranks of a sequence do not
    return x, labels


def plain(n_data: int, gas: int, clip: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, norms = Toy(), []
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(n_data):
            for micro in range(gas):
                (model(*batch(step, micro, rank))["loss"] / (n_data * gas)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        for p in model.parameters():
            p.data -= RATE * p.grad
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def config_of(stage: int, gas: int = 1, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 10, "reduce_bucket_size": 200}
    return config(stage, rows=BATCH, lr=RATE, accumulate=gas, zero=zero, gradient_clipping=clip, **more)


def make_engine(sp: int, config: dict[str, Any], way: str = "config", **toy: Any):
    how: dict[str, Any] = {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    if way == "config":
        config = {**config, "sequence_parallel_size": sp, "data_parallel_size": world // sp}
    elif way == "mesh":
        how["mesh_param"] = (world // sp, sp)
    elif sp > 1:
        parallel_state.initialize_sequence_parallel(sp)
        how["mpu"] = parallel_state
    model = Toy(**toy)
    engine, *_ = deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config, **how)
    if sp > 1:
        model.attention = DistributedAttention(attend, engine.get_sequence_parallel_group(), 2, 1)
    return engine


def part(engine: Any, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.chunk(engine.sequence_parallel_size, 1)[engine._mesh.index("sp")] for t in tensors]


def train(engine: Any, gas: int, steps: range = range(STEPS)) -> list[float]:
    norms = []
    for step in steps:
        for micro in range(gas):
            x, labels = part(engine, batch(step, micro, groups.get_data_parallel_rank()))
            update(engine, engine(x, labels=labels)["loss"])
        norms.append(engine.get_global_grad_norm())
    return norms


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: deepspeed_c.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


CELLS: list[tuple[str, dict[str, Any]]] = [
    ("config", {"stage": 0, "gas": 2}),
    ("mesh", {"stage": 1, "clip": 0.2}),
    ("mpu", {"stage": 2, "gas": 2, "clip": 0.2}),
    ("config", {"stage": 3, "gas": 2, "prescale_gradients": True}),
    ("mpu", {"stage": 3, "seq_parallel_communication_data_type": None}),
]


def parity_body(rank: int, world: int, sp: int) -> list[Any]:
    found = []
    for way, cell in CELLS:
        with make_engine(sp, config_of(**cell), way) as engine:
            n_data = world // sp
            assert engine.dp_world_size == n_data and engine.seq_dp_world_size == world
            assert engine.train_batch_size() == BATCH * cell.get("gas", 1) * n_data
            assert groups.get_data_parallel_world_size() == n_data and groups._get_data_parallel_rank() == rank // sp
            assert groups._get_sequence_data_parallel_world_size() == world
            assert groups._get_sequence_parallel_world_size() == engine.sequence_parallel_size == sp
            if sp > 1:
                ranks = list(range(rank // sp * sp, rank // sp * sp + sp))
                assert dist.get_process_group_ranks(groups._get_sequence_parallel_group()) == ranks
                assert groups._get_sequence_parallel_rank() == rank % sp
            norms = train(engine, cell.get("gas", 1))
            found.append((weights_of(engine), norms))
    return found


@pytest.mark.parametrize("world, sp", [(2, 2), (4, 4), (4, 2), (3, 1)])
def test_as_one_plain_process(world: int, sp: int) -> None:
    everyone = run_ranks(world, parity_body, sp)
    for i, (_, cell) in enumerate(CELLS):
        weights, norms = plain(world // sp, cell.get("gas", 1), cell.get("clip", 0.0))
        for of_rank in everyone:
            got, got_norms = of_rank[i]
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0, msg=f"{cell} {got_norms} {norms}")
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=lambda m: f"{cell} {name} {m}")  # noqa: B023


def bf16_body(rank: int, world: int, stage: int) -> Any:
    with make_engine(2, config_of(stage, bf16={"enabled": True})) as engine:
        return train(engine, 1), weights_of(engine)


def test_in_bf16_only_rounding_differs() -> None:
    weights, norms = plain(1, 1, 0.0)
    start = dict(Toy().named_parameters())
    for stage in (1, 3):
        for got_norms, got in run_ranks(2, bf16_body, stage):
            torch.testing.assert_close(got_norms, norms, rtol=3e-2, atol=0)
            for name, value in weights.items():
                assert (got[name] - value).norm() < 0.1 * (value - start[name]).norm() + 1e-3, name


def fp16_body(rank: int, world: int, stage: int, power: int) -> Any:
    fp16 = {"enabled": True, "initial_scale_power": power, "loss_scale_window": 1000, "hysteresis": 1}
    with make_engine(2, config_of(stage, gas=2, fp16=fp16)) as engine:
        norms = train(engine, 2)
        return norms, weights_of(engine), engine.skipped_steps, engine.optimizer.cur_scale


@pytest.mark.parametrize("stage", [1, 3])
def test_in_fp16_the_loss_scale_cancels(stage: int) -> None:
    weights, norms = plain(1, 2, 0.0)
    start = dict(Toy().named_parameters())
    for got_norms, got, n_skipped, scale in run_ranks(2, fp16_body, stage, 8):
        assert (n_skipped, scale) == (0, 256)
        torch.testing.assert_close(got_norms, norms, rtol=1e-2, atol=0)
        for name, value in weights.items():
            assert (got[name] - value).norm() < 0.02 * (value - start[name]).norm() + 1e-4, name


def test_in_fp16_ranks_of_a_sequence_skip_together() -> None:
    start = dict(Toy().named_parameters())
    for _, got, n_skipped, scale in run_ranks(2, fp16_body, 1, 24):
        assert (n_skipped, scale) == (STEPS, 2**21)
        for name, value in start.items():
            torch.testing.assert_close(got[name], value.detach(), msg=name)


def save_body(rank: int, world: int, sp: int, stage: int, folder: str) -> Any:
    with make_engine(sp, config_of(stage, optimizer={"type": "Adam", "params": {"lr": 0.1}})) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder, "t")
        before = weights_of(engine)
        train(engine, 1, range(STEPS, STEPS + 2))
        return before, weights_of(engine)


def load_body(rank: int, world: int, sp: int, stage: int, folder: str) -> Any:
    with make_engine(sp, config_of(stage, optimizer={"type": "Adam", "params": {"lr": 0.1}}), seed=7) as engine:
        assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == STEPS
        before = weights_of(engine)
        train(engine, 1, range(STEPS, STEPS + 2))
        return before, weights_of(engine)


# (ranks, sequence-parallel ranks, stage). All arrangements see the same samples.
ARRANGEMENTS = [(1, 1, 1), (2, 2, 3), (4, 4, 1), (2, 2, 2)]


def test_a_checkpoint_loads_with_any_number_of_ranks_a_sequence_and_without(tmp_path) -> None:
    saved = [
        run_ranks(world, save_body, sp, stage, str(tmp_path / str(i)))[0]
        for i, (world, sp, stage) in enumerate(ARRANGEMENTS)
    ]
    for i, (world, sp, stage) in enumerate(ARRANGEMENTS):
        other = (i + 1) % len(ARRANGEMENTS)
        for before, after in run_ranks(world, load_body, sp, stage, str(tmp_path / str(other))):
            for name, value in saved[other][0].items():
                assert torch.equal(before[name], value), name
                torch.testing.assert_close(after[name], saved[other][1][name], rtol=1e-3, atol=1e-4)


def dropout_body(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with make_engine(2, config_of(1), dropout=0.5) as engine:
        model, found = engine.module, []
        outside = torch.get_rng_state()
        for step in range(2):
            train(engine, 1, range(step, step + 1))
            found.append(model.dropped)
        assert torch.equal(torch.get_rng_state(), outside)  # the random state of the program does not change
        engine.save_checkpoint(folder, "t")
        train(engine, 1, range(2, 3))
        found.append(model.dropped)
        engine.load_checkpoint(folder, "t")
        train(engine, 1, range(2, 3))
        assert torch.equal(model.dropped, found[-1])
        return found


def test_ranks_of_a_sequence_drop_other_elements(tmp_path) -> None:
    one, other = run_ranks(2, dropout_body, str(tmp_path))
    for a, b in zip(one, other):
        assert not torch.equal(a, b)
    assert not torch.equal(one[0], one[1])


@on_ranks(2)
def test_what_does_not_fit_is_refused(rank: int, world: int) -> None:
    for more, text in (
        ({"sequence_parallel_size": 3}, "cannot be cut into groups of 3"),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, "2 data-parallel times 2 sequence-parallel"),
    ):
        with pytest.raises(ConfigError, match=text):
            deepspeed_c.initialize(model=Toy(), config=config_of(1, **more))
    with pytest.raises(CommError, match="do not fit 2 ranks"):
        deepspeed_c.initialize(model=Toy(), config=config_of(1), mesh_param=(2, 2))
    with pytest.raises(ConfigError, match="3 does not divide the 2 ranks"):
        parallel_state.initialize_sequence_parallel(3)
    with make_engine(2, config_of(1)) as engine:
        x, labels = part(engine, batch(0, 0, 0))
        loss = engine(x, labels=labels)["loss"]
        with pytest.raises(BackwardError, match="how this rank's loss contributes"):
            loss.backward()
        engine.scale(engine(x, labels=labels)["loss"]).backward()
        engine.step()
        assert engine.global_steps == 1
    with make_engine(2, config_of(1, sequence_parallel={"loss": "mean"})) as engine:
        engine.module.forward = lambda *given, forward=engine.module.forward: forward(*given)
        loss = engine(x, labels)["loss"]  # positional: the engine cannot know that these are labels
        with pytest.raises(StateError, match="was given no labels"):
            engine.backward(loss)


def ways_body(rank: int, world: int, way: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with the script's own loss. The first word of ``way`` is the configured kind of loss."""
    with make_engine(2, config_of(2, sequence_parallel={"loss": way.split(",")[0]})) as engine:
        norms, group = [], engine.get_sequence_parallel_group()
        for step in range(STEPS):
            x, labels = part(engine, batch(step, 0, 0))
            logits = engine(x, labels=labels)["logits"]
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            n_valid = (labels != -100).sum()
            n_all = n_valid.clone()
            dist.all_reduce(n_all, group=group)
            if way == "mean":
                loss = total / n_valid.clamp(min=1)
            elif way == "part":
                loss = total / n_all
            elif way == "whole":
                loss = dist.nn.functional.all_reduce(total, group=group) / n_all
            elif way == "auto, all_reduce":
                loss = functional.all_reduce(total, "sum", group) / n_all
            else:
                loss = functional.all_gather_single(total[None], 0, group).sum() / n_all
            update(engine, loss)
            norms.append(engine.get_global_grad_norm())
        return norms, weights_of(engine)


@pytest.mark.parametrize("way", ["mean", "part", "whole", "auto, all_reduce", "auto, all_gather"])
def test_a_loss_is_what_the_section_says(way: str) -> None:
    weights, norms = plain(1, 1, 0.0)
    for got_norms, got in run_ranks(2, ways_body, way):
        torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0)
        for name, value in weights.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
