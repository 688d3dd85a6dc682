"""recompute/budget.py: plans agree with the measured memory of a step and are equal on all ranks. Plans are pinned,
remade and refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from deepspeed_c import accelerator, checkpointing
from deepspeed_c.cgroups import memory_left
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import ConfigError, OffloadError, RankMismatchError
from deepspeed_c.logging import logger
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.recompute.budget import (
    KEEP,
    RECOMPUTE,
    Tier,
    Treatment,
    _steadied,
    find_plan,
    read_budget,
    read_plan,
    smallest_budget,
    unite,
)
from deepspeed_c.recompute.operators import MeasuredLayer, MeasuredOperator
from deepspeed_c.recompute.recomputer import Recomputer
from tests.training import config, engine_of, update

WIDTH, HEADS, LAYERS, ROWS, TOKENS = 32, 4, 8, 2, 128


class Layer(nn.Module):
    """A transformer layer with dropout, also within attention, and a matrix product whose output is overwritten."""

    def __init__(self, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.attention_dropout = dropout, attention_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(x.shape)).mul_(0.5)
        x = x + nn.functional.dropout(y, self.dropout, self.training)
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.second(x)))), self.dropout, self.training)


class Model(nn.Module):
    """A model in which one layer runs twice and two layers share a weight."""

    def __init__(self, attention_dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Layer(0.1, attention_dropout) for _ in range(LAYERS))
        self.layers[3].up.weight = self.layers[2].up.weight
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return self.head(x).square().mean()


def train(section: dict, shapes: list[tuple[int, int]], stage: int = 0, rank: int = 0, dropout: float = 0.1) -> Any:
    """(losses, peaks of live bytes of forward and backward, the plan after each step, weights)."""
    model = Model(dropout)
    settings = config(stage, activation_checkpointing=section)
    losses, peaks, plans = [], [], []
    with LiveBytes() as live, engine_of(model, settings) as engine:
        for step, (rows, tokens) in enumerate(shapes):
            torch.manual_seed(100 * step + rank)
            x = torch.randn(rows, tokens, WIDTH)
            before = live.nbytes()
            with live.phase(f"{step}"):
                loss = engine(x)
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            del loss
            peaks.append(live.peaks[f"{step}"] - before)
            budget = engine._blocks.recomputer.budget
            plans.append(None if budget is None else budget.plan)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, peaks, plans, weights


def peaks_body(rank: int, world: int) -> dict[str, Any]:
    shapes = [(ROWS, TOKENS)] * 3
    found = {"kept": train({}, shapes), "recomputed": train({"layers": "auto"}, shapes)}
    unlimited = train({"layers": "auto", "budget": "1GiB"}, shapes)[2][-1]
    half = (unlimited.smallest_bytes + unlimited.peak_bytes) // 2
    return found | {"half": train({"layers": "auto", "budget": half}, shapes), "all": unlimited}


def test_a_step_holds_what_its_plan_says(run_ranks: Callable) -> None:
    (found,) = run_ranks(1, peaks_body)
    everything, plan = found["all"], found["half"][2][-1]
    assert set(everything.treatments) == {Treatment(KEEP)} and everything.added_ns == 0
    # The memory of gradients and of the rest of the model: the peak of a recomputed step less its planned minimum.
    besides = found["recomputed"][1][-1] - plan.smallest_bytes
    kept = found["kept"][1][-1] - besides
    measured = found["half"][1][-1] - besides
    assert kept == pytest.approx(everything.peak_bytes, rel=0.05), (kept, everything.peak_bytes)
    assert measured == pytest.approx(plan.budget_bytes, rel=0.05), (measured, plan)
    assert plan.smallest_bytes < plan.peak_bytes <= plan.budget_bytes < everything.peak_bytes
    assert plan.added_ns > 0 and plan.treatments[-1].choice == KEEP
    # The first step recomputes everything. While it measures a layer it also holds the outputs of its operators.
    first, recomputed = found["half"][1][0], found["recomputed"][1][0]
    assert first <= recomputed + kept / (LAYERS + 1), (first, recomputed, kept)
    for name in ("recomputed", "half"):
        assert found[name][0] == found["kept"][0], (name, found[name][0], found["kept"][0])
        assert torch.equal(found[name][3], found["kept"][3])


def flows_body(rank: int, world: int, folder: str) -> dict[str, Any]:
    shapes = [(ROWS, TOKENS)] * 2
    found: dict[str, Any] = {"plain": train({}, shapes, rank=rank)}
    everything = train({"layers": "auto", "budget": "1GiB"}, shapes, rank=rank)[2][-1]
    half = (everything.smallest_bytes + everything.peak_bytes) // 2
    path = f"{folder}/plans/one.json"
    pinned = {"layers": "auto", "budget": half, "budget_plan": path}
    found["written"] = train(pinned, shapes, rank=rank)
    found["read"] = train({**pinned, "budget": 1}, shapes, rank=rank)
    # Without dropout, attention draws no random numbers and may be kept.
    found["still"] = train({"layers": "auto", "budget": half}, shapes, rank=rank, dropout=0.0)
    found["still plain"] = train({}, shapes, rank=rank, dropout=0.0)
    # Rank 1 gets longer rows from the third step on. Plans are made for the longest rows.
    grown = [(ROWS, TOKENS)] * 2 + [(ROWS, TOKENS + 32 * rank)] * 2
    found["grown"] = train({"layers": "auto", "budget": half}, grown, rank=rank)
    found["grown plain"] = train({}, grown, rank=rank)
    with mock.patch.object(logger, "warning") as warning:
        found["tiny"] = train({"layers": "auto", "budget": 1000}, shapes, rank=rank)
    found["told"] = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    found["smallest"] = everything.smallest_bytes
    # Ranks that gather weights make one plan, for the longest rows of any rank.
    found["sharded"] = train({"layers": "auto", "budget": half}, grown, 3, rank)
    found["sharded plain"] = train({}, grown, 3, rank)
    return found


def auto_body(rank: int, world: int, folder: str) -> Any:
    with mock.patch.object(accelerator, "memory_left", partial(memory_left, folder)):
        return train({"layers": "auto", "budget": "auto"}, [(ROWS, TOKENS)] * 3, rank=rank)[2]


def test_auto_takes_this_ranks_part_of_what_the_container_leaves(run_ranks: Callable, tmp_path: Path) -> None:
    n_left = 11_000_000
    for path, text in (
        ("proc/self/cgroup", "0::/pod\n"),
        ("sys/fs/cgroup/pod/memory.max", f"{10 * n_left}\n"),
        ("sys/fs/cgroup/pod/memory.current", f"{9 * n_left}\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for plans in run_ranks(2, auto_body, str(tmp_path)):
        # The first step recomputes everything, because gradients and states do not exist yet.
        assert plans[0].treatments == () and plans[1] == plans[2]
        plan = plans[1]
        assert plan.budget_bytes == int(0.9 * (n_left // 2)), plan
        assert plan.smallest_bytes < plan.peak_bytes <= plan.budget_bytes
        assert {treatment.choice for treatment in plan.treatments} == {KEEP, RECOMPUTE}, plan


def test_ranks_agree_on_plans(run_ranks: Callable, tmp_path: Path) -> None:
    ranks = run_ranks(2, flows_body, str(tmp_path))
    assert ranks[0]["sharded"][2] == ranks[1]["sharded"][2]
    for rank, found in enumerate(ranks):
        for name, plain in (
            ("written", "plain"),
            ("read", "plain"),
            ("tiny", "plain"),
            ("still", "still plain"),
            ("grown", "grown plain"),
            ("sharded", "sharded plain"),
        ):
            assert found[name][0] == found[plain][0], (name, found[name][0], found[plain][0])
            assert torch.equal(found[name][3], found[plain][3]), name
        assert found["read"][2][0] == found["read"][2][1] == ranks[0]["written"][2][-1]
        for name, is_remade in (("grown", rank == 1), ("sharded", True)):
            before, same, grown, still_grown = found[name][2]
            assert before == same and grown == still_grown and (grown != before) == is_remade, (name, rank)
            assert grown.n_elems == ROWS * (TOKENS + 32 * is_remade) * WIDTH, (name, rank, grown.n_elems)
        tiny = found["tiny"][2][-1]
        assert tiny.peak_bytes == tiny.smallest_bytes == found["smallest"], (tiny, found["smallest"])
        assert len(found["told"]) == 1 and f"are less than the {found['smallest']} " in found["told"][0], found["told"]
    assert read_plan(str(tmp_path / "plans" / "one.json")) == ranks[0]["written"][2][-1]


class Mixing(nn.Module):
    """Attention without heads. The scores take tokens times tokens elements."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Choosing(nn.Module):
    """Experts. An expert runs only if a token is routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, flat = self.gate(x).argmax(-1).flatten(), x.flatten(0, 1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            tokens = (chosen == i).nonzero().flatten()
            if len(tokens):
                y = y.index_add(0, tokens, torch.tanh(expert(flat[tokens])))
        return x + y.view_as(x)


class Sending(nn.Module):
    """Normalizes by the mean over ranks, as a synchronized batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        mean = y.detach().mean((0, 1))
        torch.distributed.all_reduce(mean)
        return x + self.down(torch.sigmoid(y - mean))


class Chain(nn.Module):
    """A chain of layers. A rank skips some of them, different layers in each step."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(kind() for _ in range(6))
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i in self.skipped else layer(x)
        return x.square().mean()


def chain_run(
    kind: type[nn.Module],
    shapes: list[tuple[int, int]],
    section: dict,
    rank: int,
    stage: int = 0,
    *,
    drops: bool = False,
) -> Any:
    """Returns (losses, weights, bytes that each forward keeps besides weights, plans)."""
    model = Chain(kind)
    settings = config(stage, activation_checkpointing=section)
    losses, kept, plans = [], [], []
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with engine_of(model, settings) as engine:
        for step, (rows, tokens) in enumerate(shapes):
            torch.manual_seed(100 * step + rank)
            if drops:
                model.skipped = {(step + rank) % 6, (2 * step + 3 * rank + 1) % 6}
            held: dict[int, int] = {}

            def note(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
                held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
                return tensor

            with saved_tensors_hooks(note, lambda tensor: tensor):
                loss = engine(torch.randn(rows, tokens, WIDTH))
            kept.append(sum(n for place, n in held.items() if place not in weights))
            update(engine, loss)
            losses.append(loss.item())
            blocks = engine._blocks.recomputer.budget
            plans.append(None if blocks is None else blocks.plan)
        flat = torch.cat([p.detach().flatten() for p in model.parameters()]) if stage < 3 else None
    return losses, flat, kept, plans


def shapes_body(rank: int, world: int) -> Any:
    shapes = [(16, 16), (16, 16), (1, 256), (1, 256), (16, 16), (4, 512), (16, 16)]
    return chain_run(Mixing, shapes, {"layers": "auto", "budget": 900_000}, rank), chain_run(Mixing, shapes, {}, rank)


def test_a_plan_is_remade_for_longer_rows_of_as_many_elements(run_ranks: Callable) -> None:
    (((losses, weights, kept, plans), plain),) = run_ranks(1, shapes_body)
    assert losses == plain[0] and torch.equal(weights, plain[1])
    # The mean after the layers keeps their output.
    fitting = [n_bytes - 4 * 16 * 16 * WIDTH for n_bytes in kept[:5]]
    assert max(fitting) <= 900_000 < plain[2][3] / 2, (kept, plain[2])
    assert plans[0] == plans[1] == plans[4] == plans[6] != plans[2] == plans[3], "a plan for each shape, made once"
    assert plans[5].peak_bytes == plans[5].smallest_bytes > plans[5].budget_bytes, "too large, and no end of the run"


def apart_body(rank: int, world: int, name: str, stage: int) -> Any:
    """Trains ranks that differ in operators, in layers or in rows."""
    kind = {"routing": Choosing, "dropped": Mixing, "sends": Sending}[name]
    shapes = [(3, 8 + 16 * rank * (name == "sends"))] * 7
    options = {"drops": name == "dropped"}
    # With this budget rank 0 could keep all of the model whose layers send.
    budget = 100_000 if name == "sends" else 20_000
    section = {"layers": r"layers\.\d", "budget": budget}
    return chain_run(kind, shapes, section, rank, stage, **options), chain_run(kind, shapes, {}, rank, stage, **options)


@pytest.mark.parametrize(("name", "stage"), [("routing", 0), ("routing", 3), ("dropped", 0), ("sends", 1)])
def test_ranks_that_do_not_do_the_same(run_ranks: Callable, name: str, stage: int) -> None:
    for (losses, weights, _, plans), plain in run_ranks(2, apart_body, name, stage):
        assert losses == plain[0], (losses, plain[0])
        assert stage == 3 or torch.equal(weights, plain[1])
        assert len(plans[-1].labels) == 6, plans[-1]
        if name == "sends":
            assert set(plans[-1].treatments) == {Treatment(RECOMPUTE)}, "else one rank would send alone"


def test_layers_of_several_forwards_are_united() -> None:
    def forward(labels: str, n_bytes: int, *names: str) -> list[MeasuredLayer]:
        operators = tuple(MeasuredOperator(name, 5, 5, True, True) for name in names)
        return [MeasuredLayer(label, 10, 10, n_bytes, 1000, operators) for label in labels]

    assert [one.label for one in unite([forward("abd", 1), forward("acd", 2), forward("e", 3)])] == list("eacbd")
    found = unite([[], forward("aba", 100, "mm"), forward("ab", 120, "mm"), forward("b", 90, "mm", "bmm")])
    assert [(one.label, one.saved_bytes, len(one.operators)) for one in found] == [
        ("a", 120, 1),
        ("b", 120, 0),
        ("a", 100, 1),
    ]
    assert not any(one.sends for one in found)
    turned = unite([forward("ab", 100), forward("ba", 100)])
    assert [one.label for one in turned] == ["a", "b"] and all(one.sends for one in turned)
    assert {each.choice for each in find_plan(turned, 1 << 20).treatments} == {RECOMPUTE}


def layer(label: str = "a", operators: tuple = ()) -> MeasuredLayer:
    return MeasuredLayer(label, 10, 10, 100, 1000, operators)


@pytest.mark.parametrize("combine", [unite, lambda runs: _steadied([each for run in runs for each in run])])
def test_operators_whose_times_vary_leave_time_for_the_rest(combine: Callable) -> None:
    """The largest times of operators add up to more than the layer took in any run. So do the medians."""

    def run(*ns: int) -> list[MeasuredLayer]:
        return [layer("a", tuple(MeasuredOperator("mm", 20, each, False, True) for each in ns))]

    found = combine([run(900, 50), run(50, 900), run(900, 50)])[0]
    assert found.ns - sum(op.ns for op in found.operators) == 50, found
    plan = find_plan([found], 1 << 40)
    assert (plan.treatments, plan.added_ns) == ((Treatment(KEEP),), 0), plan


def test_operators_are_kept_by_what_they_save() -> None:
    slow = MeasuredOperator("all_reduce", 20, 600, True, True)
    random = MeasuredOperator("attention", 20, 300, True, False)
    cheap = MeasuredOperator("mm", 20, 100, False, True)
    layers = [layer("a", (random, cheap, slow)), layer("b")]
    assert smallest_budget(layers) == 110
    assert find_plan(layers, 110).treatments == (Treatment(RECOMPUTE), Treatment(KEEP))
    plan = find_plan(layers, 130)
    assert plan.treatments == (Treatment(RECOMPUTE, (2,)), Treatment(KEEP))
    assert (plan.added_ns, plan.all_ns, plan.peak_bytes, plan.labels) == (400, 2000, 130, ("a", "b"))
    assert find_plan(layers, 150).treatments[0] == Treatment(RECOMPUTE, (1, 2))
    idle = MeasuredOperator("addmm", 20, 0, False, True)  # is not recomputed
    assert find_plan([layer("a", (random, cheap, slow, idle)), layer("b")], 170).treatments[0].operators == (1, 2)
    assert find_plan(layers, 150, may_mix=False).treatments[0] == Treatment(RECOMPUTE)
    assert find_plan(layers, 200).treatments == (Treatment(KEEP), Treatment(KEEP))
    lines = plan.table(layers).splitlines()
    assert lines[1] == "  a (1): recomputed but for all_reduce" and lines[2] == "  b (1): kept", lines


def tiers_by_hand(layers: list[MeasuredLayer], budget: int, tier: Tier) -> int | None:
    """The least time that any plan within the budget adds. None if no plan fits."""
    best = None
    for chosen in itertools.product((KEEP, RECOMPUTE, "nvme"), repeat=len(layers)):
        held = peak = added = 0
        for one, choice in zip(layers, chosen):
            away = one.movable_bytes if choice == "nvme" else 0
            held += one.saved_bytes if choice == KEEP else one.input_bytes - away
            peak = max(peak, held + (0 if choice == KEEP else one.saved_bytes + away))
            if choice == KEEP:
                continue
            added += one.ns
            if choice == "nvme":
                way = 1e9 * away / tier.bytes_per_s
                added += int(1e9 * away / tier.thread_bytes_per_s + 2 * max(way - one.ns, 0) + way / 50)
        # If any inputs go to files, the inputs of one layer are being written while those of another are read.
        peak += 2 * max(one.movable_bytes for one in layers) * ("nvme" in chosen)
        if peak <= budget and (best is None or added < best):
            best = added
    return best


@pytest.mark.parametrize("seed", range(12))
def test_inputs_wait_elsewhere_where_that_costs_least(seed: int) -> None:
    draw = random.Random(seed)
    layers = []
    for i in range(draw.choice([1, 2, 5, 6])):
        n_input = draw.randrange(0, 50)
        movable = draw.randrange(0, n_input + 1)
        layers.append(MeasuredLayer(f"{i}", 10, n_input, draw.randrange(10, 200), draw.randrange(1, 900), (), movable))
    tier = Tier(draw.choice([1e7, 1e8, 1e12]), draw.choice([1e8, math.inf]))
    smallest = smallest_budget(layers, {"nvme": tier})
    assert tiers_by_hand(layers, smallest - 1, tier) is None
    for budget in (smallest, smallest + 17, smallest + 60, smallest + 300, 1 << 40):
        plan = find_plan(layers, budget, tiers={"nvme": tier})
        assert plan.added_ns == tiers_by_hand(layers, budget, tier), (budget, plan)
        assert plan.peak_bytes <= budget
        assert plan.smallest_bytes == smallest
    with pytest.raises(ConfigError, match=str(smallest)):
        find_plan(layers, smallest - 1, tiers={"nvme": tier})


FAST, SLOW = Tier(1e15), Tier(1.0, 1.0)


def with_files_body(rank: int, world: int, folder: str, stage: int) -> dict[str, Any]:
    """Runs a budget that is too small for recomputation with inputs in memory, and a larger budget with a slow disk."""
    shapes = [(ROWS, TOKENS)] * 3
    section = {"layers": "auto", "offload": {"device": "nvme", "nvme_path": folder}}
    found = {"kept": train({}, shapes, stage, rank)}
    unlimited = train({"layers": "auto", "budget": "1GiB"}, shapes, stage, rank)[2][-1]
    n_input = 4 * ROWS * TOKENS * WIDTH
    budget = unlimited.smallest_bytes - 4 * n_input
    with mock.patch.object(Recomputer, "_probe", lambda self, n_bytes: FAST if rank == 0 else Tier(1e14)):
        pinned = str(Path(folder, "plan.json"))
        found["little"] = train({**section, "budget": budget, "budget_plan": pinned}, shapes, stage, rank)
        found["again"] = train({**section, "budget": budget, "budget_plan": pinned}, shapes, stage, rank)
    with mock.patch.object(Recomputer, "_probe", lambda self, n_bytes: SLOW if rank else FAST):
        found["slow"] = train({**section, "budget": unlimited.smallest_bytes}, shapes, stage, rank)
    found["measured"] = train({**section, "budget": budget}, shapes, stage, rank)
    with pytest.raises(ConfigError, match=r"wait on 'nvme' there, which the section does not offer"):
        train({"layers": "auto", "budget": budget, "budget_plan": pinned}, shapes, stage, rank)
    return found | {"budget": budget, "all": unlimited}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_file_makes_room_for_what_has_none(run_ranks: Callable, tmp_path: Path, stage: int) -> None:
    ranks = run_ranks(2, with_files_body, str(tmp_path), stage)
    for found in ranks:
        kept = found["kept"]
        for name in ("little", "again", "slow", "measured"):
            losses, _, _, weights = found[name]
            assert losses == kept[0], name
            assert torch.equal(weights, kept[3]), name
        if stage == 3:
            assert found["little"][2] == ranks[0]["little"][2], "the same plan on all ranks"
            assert found["measured"][2] == ranks[0]["measured"][2]
        assert found["again"][2][0] == ranks[0]["little"][2][-1], "pinned"
        plan = found["little"][2][-1]
        assert {t.choice for t in plan.treatments} >= {"nvme"}
        assert plan.peak_bytes <= plan.budget_bytes == found["budget"]
        assert "nvme" in {t.choice for t in found["measured"][2][-1].treatments}
        assert {t.choice for t in found["slow"][2][-1].treatments} <= {KEEP, RECOMPUTE}
        # The first step writes all inputs to files. Later steps keep as many in memory as fit.
        besides = kept[1][-1] - found["all"].peak_bytes
        assert found["little"][1][-1] - besides <= 1.05 * found["budget"], (
            found["little"][1],
            besides,
            found["budget"],
        )


def test_a_disk_that_fails_is_an_error_on_all_ranks(run_ranks: Callable, tmp_path: Path) -> None:
    assert run_ranks(2, failing_body, str(tmp_path)) == ["refused"] * 2


def failing_body(rank: int, world: int, folder: str) -> str:
    section = {"layers": "auto", "budget": "1GiB", "offload": {"device": "nvme", "nvme_path": folder}}

    def probe(self: Recomputer, n_bytes: int) -> Tier:
        if rank:
            raise OffloadError("the disk is gone", where="here", fix="buy one")
        return FAST

    with (
        mock.patch.object(Recomputer, "_probe", probe),
        pytest.raises(OffloadError, match="the disk is gone" if rank else "rank 1"),
    ):
        train(section, [(ROWS, TOKENS)], rank=rank)
    return "refused"


def test_what_is_refused(tmp_path: Path) -> None:
    for wrong in (0, -1, "much", "0GB"):
        with pytest.raises(ConfigError, match="activation_checkpointing.budget"):
            read_budget(ActivationCheckpointing(budget=wrong))
    assert read_budget(ActivationCheckpointing(budget="1.5KiB")) == 1536
    path = tmp_path / "plan.json"
    assert read_plan(str(path)) is None
    good = find_plan([layer()], 1000).as_json()
    for wrong in (
        "{",
        "[]",
        json.dumps({**good, "version": 2}),
        json.dumps({**good, "labels": []}),
        json.dumps({**good, "more": 1}),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="plan"):
            read_plan(str(path))
    with pytest.raises(ConfigError, match="configure does not"):
        checkpointing.configure(None, {"train_batch_size": 1, "activation_checkpointing": {"budget": "1GiB"}})


def strange_body(rank: int, world: int, folder: str) -> str:
    plan = find_plan([layer("layers.0"), layer("another")], 1000).as_json()
    folders = {"same": Path(folder, "same"), "own": Path(folder, f"rank{rank}"), "one": Path(folder, f"one{rank}")}
    for name, place in folders.items():
        place.mkdir(exist_ok=True)
        text = json.dumps({**plan, "added_ns": rank if name == "own" else 0})
        if name == "own" or rank == 0:
            (place / "plan.json").write_text(text)
    torch.distributed.barrier()
    wanted = {
        "same": (ConfigError, r"layer 1 of the forward is layers\.1, and another in the plan"),
        "own": (RankMismatchError, "ranks have read other plans"),
        "one": (RankMismatchError, r"ranks have read other plans: .*, 0\] \(0: there is no such file"),
    }
    for name, (error, words) in wanted.items():
        with contextlib.chdir(folders[name]), pytest.raises(error, match=words):
            train({"layers": "auto", "budget": 5, "budget_plan": "plan.json"}, [(ROWS, TOKENS)], rank=rank)
    return "refused"


def test_plans_of_other_models_are_refused(run_ranks: Callable, tmp_path: Path) -> None:
    assert run_ranks(2, strange_body, str(tmp_path)) == ["refused"] * 2
