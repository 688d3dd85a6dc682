"""The weight of a rank's loss if it is not configured (engine/share.py). Parameters after SGD equal those of one plain
process, or all ranks get an error, or a warning names the factor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives

import deepspeed_c
from deepspeed_c.errors import StateError
from deepspeed_c.sequence.layer import DistributedAttention
from deepspeed_c.sequence.loss import vocab_sequence_parallel_cross_entropy
from deepspeed_c.utils import groups
from tests.deepspeed_c.sequence.test_engine import (
    RATE,
    STEPS,
    WIDTH,
    Toy,
    attend,
    batch,
    config_of,
    part,
    plain,
    weights_of,
)
from tests.log_lines import LogLines
from tests.ranks import run_ranks
from tests.training import update


class Unlabelled(Toy):
    """Returns only logits and takes no labels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.zeros(x.shape[:2], dtype=torch.int64))["logits"]


class Scalar(Toy):
    """Returns only its loss, not a dict."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(x, labels)["loss"]


class Gathering(Toy):
    """Gathers values of all ranks in a layer. Its loss is nevertheless a mean over the rank's own tokens."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = collectives.all_gather(x * self.out.bias, group=groups._get_sequence_parallel_group())
        return super().forward(x + 0.1 * torch.cat(parts, 1).mean(1, keepdim=True), labels)


class GatheringAlone(Toy):
    """The same model as ``Gathering``, for one process."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + 0.1 * (x * self.out.bias).mean(1, keepdim=True), labels)


class OwnGather(torch.autograd.Function):
    """A gather of the user's. Its backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, parts = group, [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value.detach(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def own_gather_without_sum(value: torch.Tensor, group: Any) -> torch.Tensor:
    """The values of all ranks. Only the value of this rank is in the graph."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.detach(), group=group)
    parts[dist.get_rank(group)] = value
    return torch.stack(parts)


def mean_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def whole_of(logits: torch.Tensor, labels: torch.Tensor, gather: Callable[..., Any]) -> torch.Tensor:
    group = groups._get_sequence_parallel_group()
    counts = own_gather_without_sum((labels != -100).sum(), group)
    return (gather(mean_of(logits, labels), group) * counts).sum() / counts.sum()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": mean_of,
    "weighted": lambda logits, labels: whole_of(logits, labels, lambda mine, _: own_term(mine)),
    "own gather": lambda logits, labels: whole_of(logits, labels, OwnGather.apply),
    "gather without a sum": lambda logits, labels: whole_of(logits, labels, own_gather_without_sum),
    "the package's": lambda logits, labels: package_mean(logits, labels),
    "torch's gather": lambda logits, labels: whole_of(
        logits, labels, lambda mine, group: torch.stack(collectives.all_gather(mine, group=group))
    ),
}


def package_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the valid tokens of whole sequences."""
    group = groups._get_sequence_parallel_group()
    losses = vocab_sequence_parallel_cross_entropy(logits.transpose(0, 1), labels.t(), group)
    counts = own_gather_without_sum((labels != -100).sum(), group)
    return losses.sum() / counts.sum()


class Inside(Toy):
    """Computes its loss by the package's function."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(x, labels)["logits"]
        return {"loss": package_mean(logits, labels), "logits": logits}


def own_term(mine: torch.Tensor) -> torch.Tensor:
    """The value of this rank, with zeros in the places of the other ranks."""
    group = groups._get_sequence_parallel_group()
    return torch.stack([mine if r == dist.get_rank(group) else 0 * mine for r in range(dist.get_world_size(group))])


def engine_of(model: torch.nn.Module, sp: int, way: str | None = None, **config: Any) -> Any:
    section = {} if way is None else {"sequence_parallel": {"loss": way}}
    engine, *_ = deepspeed_c.initialize(
        model=model, config=config_of(1, sequence_parallel_size=sp, **{**section, **config})
    )
    model.attention = DistributedAttention(attend, engine.get_sequence_parallel_group(), 2, 1)
    return engine


def outside_body(rank: int, world: int, sp: int, kind: str, way: str | None) -> tuple[Any, list[str], Any]:
    """The loss is computed outside of a model that gets no labels. Returns (weights, warnings, (error, how far weights
    moved))."""
    start = {name: p.detach().clone() for name, p in Unlabelled().named_parameters()}
    with LogLines(logging.WARNING) as records, engine_of(Unlabelled(), sp, way) as engine:
        gathers = engine._comm.gather_objects
        n_gathers = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal n_gathers
            n_gathers += 1
            return gathers(*args, **kwargs)

        engine._comm.gather_objects = counted
        for step in range(STEPS):
            x, labels = part(engine, batch(step, 0, groups.get_data_parallel_rank()))
            engine.backward(LOSSES[kind](engine(x), labels))
            try:
                engine.step()
            except StateError as error:
                moved = {name: float((value - start[name]).norm()) for name, value in weights_of(engine).items()}
                return None, records.lines, (str(error), max(moved.values()))
        assert n_gathers == (1 if way is None else 0), n_gathers  # only the first step gathers
        return weights_of(engine), records.lines, None


def check_weights(got: dict[str, torch.Tensor], model: type[Toy] = Toy, n_data: int = 1) -> None:
    weights = plain(n_data, 1, 0.0)[0] if model is Toy else plain_of(model)
    for name, value in weights.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name} {m}")  # noqa: B023


def plain_of(model: type[Toy]) -> dict[str, torch.Tensor]:
    net = model()
    for step in range(STEPS):
        net.zero_grad()
        net(*batch(step, 0, 0))["loss"].backward()
        for p in net.parameters():
            p.data -= RATE * p.grad
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("kind", ["own gather", "gather without a sum"])
@pytest.mark.parametrize("world, sp", [(2, 2), (4, 2)])
def test_losses_equal_to_the_bit_are_an_error_that_names_the_key(kind: str, world: int, sp: int) -> None:
    for weights, _, error in run_ranks(world, outside_body, sp, kind, None):
        assert weights is None and error is not None, "trained without an error"
        text, moved = error
        assert '"sequence_parallel": {"loss": "whole"}' in text and '{"loss": "part"}' in text, text
        assert moved == 0.0, moved


@pytest.mark.parametrize(
    "kind, way",
    [("own gather", "whole"), ("gather without a sum", "part"), ("weighted", None), ("torch's gather", None)]
    + [("the package's", None)],
)
@pytest.mark.parametrize("world, sp", [(2, 2), (4, 4), (4, 2)])
def test_what_is_said_or_known_trains_as_one_process(kind: str, way: str | None, world: int, sp: int) -> None:
    for weights, warnings, error in run_ranks(world, outside_body, sp, kind, way):
        assert error is None, error
        check_weights(weights, n_data=world // sp)
        assert kind != "the package's" or not warnings, warnings


def inside_body(rank: int, world: int) -> tuple[Any, list[str]]:
    with LogLines(logging.WARNING) as records, engine_of(Inside(), 2) as engine:
        for step in range(STEPS):
            x, labels = part(engine, batch(step, 0, groups.get_data_parallel_rank()))
            update(engine, engine(x, labels)["loss"])
        return weights_of(engine), records.lines


def test_a_model_may_compute_its_loss_by_the_packages_function() -> None:
    for weights, warnings in run_ranks(2, inside_body):
        check_weights(weights)
        assert not warnings, warnings


def test_a_mean_that_nobody_has_named_is_a_warning_with_the_factor() -> None:
    _, texts, error = run_ranks(2, outside_body, 2, "mean", None)[0]
    assert error is None, error
    (text,) = texts  # there is one warning
    assert "about 2 times too large" in text and "other numbers" in text, text
    for word in ("mean", "whole", "part"):
        assert f'"loss": "{word}"' in text, text
    assert run_ranks(2, outside_body, 2, "weighted", "part")[0][1] == []
    assert run_ranks(2, outside_body, 2, "torch's gather", None)[0][1] == []


def own_body(rank: int, world: int, kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A model computes its own loss, which is weighted by the labels that its forward got."""
    model = {"scalar": Scalar, "placed": Toy, "gathering": Gathering, "retained": Toy}[kind]()
    with LogLines(logging.WARNING) as records, engine_of(model, world) as engine:
        for step in range(STEPS):
            x, labels = part(engine, batch(step, 0, 0))
            if kind == "scalar":
                engine.backward(engine(x, labels=labels))
            elif kind == "retained":
                loss = engine(x, labels=labels)["loss"]
                engine._window.steer(True)
                for retain in (True, False):
                    engine.backward(loss, retain_graph=retain)
            else:
                engine.backward(engine(x, labels)["loss"])
            if kind == "retained":
                for group in engine.optimizer.param_groups:
                    group["lr"] = RATE / 2
            engine.step()
        return weights_of(engine), records.lines


@pytest.mark.parametrize("kind", ["scalar", "placed", "gathering", "retained"])
def test_labels_count_where_they_are_seen(kind: str) -> None:
    for weights, texts in run_ranks(2, own_body, kind):
        check_weights(weights, GatheringAlone if kind == "gathering" else Toy)
        assert texts == []


def test_ranks_that_call_backward_a_different_number_of_times_do_not_hang() -> None:
    for n_backwards in ([1, 2], [1, 0]):
        assert run_ranks(2, unequal_body, n_backwards) == [2, 2]


def unequal_body(rank: int, world: int, n_backwards: list[int]) -> int:
    model = torch.nn.Linear(WIDTH, WIDTH)
    engine, *_ = deepspeed_c.initialize(model=model, config=config_of(1, sequence_parallel_size=2))
    with engine:
        for step in range(2):
            x, labels = part(engine, batch(step, 0, 0))
            for _ in range(n_backwards[rank]):
                engine.backward(mean_of(engine(x), labels))
            engine.step()
        return engine.global_steps


def some_body(rank: int, world: int, case: str) -> tuple[str, list[str]]:
    """The losses of the first step tell nothing about labels, or tell different things on different ranks."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    engine, *_ = deepspeed_c.initialize(model=model, config=config_of(1, sequence_parallel_size=2))
    before = model.weight.detach().clone()
    group = engine.get_sequence_parallel_group()
    with LogLines(logging.WARNING) as records, engine:
        for step in range(2):
            x, labels = part(engine, batch(step, 0, 0))
            loss = mean_of(engine(x), labels)
            if case == "one of two sequences" and rank < 2 or case == "later":
                loss = OwnGather.apply(loss, group).mean()
                loss = loss * step if case == "later" else loss
            elif case == "whole and part":
                loss = loss + 0.01 * collectives.all_reduce(loss, group=group)
            elif case == "16 bits":
                loss = OwnGather.apply(loss, group).mean().bfloat16()
            engine.backward(loss)
            try:
                engine.step()
            except StateError as error:
                moved = float((model.weight - before).norm())
                return f"step {step}: {type(error).__name__} {error} moved {moved}", records.lines
        return "trained", records.lines


@pytest.mark.parametrize("case, world, at", [("one of two sequences", 4, 0), ("later", 2, 1)])
def test_all_ranks_raise_before_anything_has_moved(case: str, world: int, at: int) -> None:
    for text, _ in run_ranks(world, some_body, case):
        assert text.startswith(f"step {at}: StateError") and text.endswith("moved 0.0"), text
        assert "ranks 0-1" in text, text


@pytest.mark.parametrize("case, words", [("whole and part", "2 times too small"), ("16 bits", "have the same loss")])
def test_what_is_doubtful_is_a_warning(case: str, words: str) -> None:
    text, warnings = run_ranks(2, some_body, case)[0]
    assert text == "trained", text
    assert [w for w in warnings if words in w and '"loss": "' in w], warnings


class Divided(Toy):
    """Divides by ``num_items_in_batch`` if it is given, as models of transformers do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        return {"loss": found["loss"] * (labels != -100).sum() / num_items_in_batch}


def items_body(rank: int, world: int, counts_all: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    with LogLines(logging.WARNING) as records, engine_of(Divided(), world) as engine:
        for step in range(STEPS):
            whole = batch(step, 0, 0)
            x, labels = part(engine, whole)
            n_items = int(((whole[1] if counts_all else labels) != -100).sum())
            update(engine, engine(x, labels=labels, num_items_in_batch=n_items)["loss"])
        return weights_of(engine), records.lines


def test_num_items_in_batch_that_counts_one_rank_is_a_warning() -> None:
    for weights, texts in run_ranks(2, items_body, True):
        assert texts == []
        check_weights(weights)
    (text,) = run_ranks(2, items_body, False)[0][1]
    assert "num_items_in_batch is 2, and ranks 0-1 have 10 valid tokens" in text and "5 times too large" in text, text
