"""Programs as users write them, with ``same_bits``: their own loops, optimizers, schedules and edits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deepspeed_c
from deepspeed_c.errors import BackwardError, StateError
from deepspeed_c.plan.cli import main
from deepspeed_c.utils import safe_get_full_grad, safe_set_full_grad
from tests.deepspeed_c.engine.test_same_bits import GRAIN, N_GRAINS, WORDS, Net, Texts, config_of, train
from tests.ranks import run_ranks


def one_micro_batch(rank: int, world: int) -> Any:
    return train({}, config_of(3, "fp32", train_batch_size=2 * GRAIN), 4)


def test_a_tied_weight_at_stage_3_with_one_micro_batch_in_a_step() -> None:
    """The order of backward changes at the end of the first window, whose gradients all came in time."""
    (one,), (two, _) = run_ranks(1, one_micro_batch), run_ranks(2, one_micro_batch)
    assert one == two, (one, two)


class Functional(Net):
    """Its head uses the embedding's weight without a module."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.embedding.weight.t()
        return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), words[:, 1:].reshape(-1))


def batches_by_position(rank: int, world: int) -> Iterator[torch.Tensor]:
    """Batch i of a rank is grain i * world + rank, from torch's own loader."""
    order = torch.randperm(3 * N_GRAINS * GRAIN, generator=torch.Generator().manual_seed(3)) % len(Texts())
    grains = order.view(-1, GRAIN).tolist()[rank::world]
    return iter(torch.utils.data.DataLoader(Texts(), batch_sampler=grains))


def own_loop(rank: int, world: int, stages: list[int], *, edits: bool, within_no_sync: bool) -> list[Any]:
    found = []
    for stage in stages:
        model = Functional(dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        config = config_of(stage, "fp32")
        del config["optimizer"]
        engine = deepspeed_c.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
        engine.compile(backend="eager")
        norms = []
        for words in batches_by_position(rank, world):
            is_last = engine.is_gradient_accumulation_boundary()
            if within_no_sync and not is_last:
                with engine.no_sync():
                    engine.backward(engine(words))
            else:
                engine.backward(engine(words))
            if edits and is_last:
                for param in model.parameters():
                    safe_set_full_grad(param, safe_get_full_grad(param) * 0.3)
            engine.step()
            norms += [engine.get_global_grad_norm()] if is_last else []
        found.append((engine.fingerprint(), norms))
        engine.close()
    return found


def plain_loop(rank: int, world: int, stages: list[int]) -> list[Any]:
    return own_loop(rank, world, stages, edits=False, within_no_sync=False)


def loop_with_edits(rank: int, world: int, stages: list[int]) -> list[Any]:
    return own_loop(rank, world, stages, edits=True, within_no_sync=False)


def loop_within_no_sync(rank: int, world: int, stages: list[int]) -> list[Any]:
    return own_loop(rank, world, stages, edits=False, within_no_sync=True)


@pytest.mark.parametrize("loop", [plain_loop, loop_with_edits])
def test_a_loop_of_torch_with_an_own_optimizer_and_schedule(loop: Callable[..., Any]) -> None:
    """A sharded tied weight whose gradients are edited: finishing a window twice does not forget what came late."""
    expected = run_ranks(1, loop, [0])[0][0]
    for world, stages in ((2, [3]), (3, [1, 3])):
        for stage, found in zip(stages, run_ranks(world, loop, stages)[0], strict=True):
            assert found == expected, (world, stage, found, expected)


def test_no_sync_changes_no_bit() -> None:
    expected, found = (run_ranks(2, loop, [0, 2])[0] for loop in (plain_loop, loop_within_no_sync))
    assert found == expected, (found, expected)


def refusals(rank: int, world: int) -> None:
    engine = deepspeed_c.initialize(model=Net(), config=config_of(2, "fp32"))[0]
    with pytest.raises(StateError, match="grain of same_bits"):
        engine.set_train_micro_batch_size(2 * GRAIN)
    with pytest.raises(StateError, match="order of a tree"), engine.coalesce_grad_reduction():
        pass
    engine.set_train_batch_size(2 * GRAIN * N_GRAINS)
    words = torch.stack([Texts()[0], Texts()[1]])
    engine.backward(engine(words))
    with pytest.raises(BackwardError, match="pass 2 of this step came in micro-batch 1"):
        engine.backward(engine(words))
    with pytest.raises(BackwardError, match="pass 2 of this step came in micro-batch 1"):
        engine(words).backward()
    engine.step()
    engine.backward(engine(words))
    engine.close()


def test_what_would_tie_bits_to_the_ranks_is_refused() -> None:
    run_ranks(2, refusals)


@pytest.mark.parametrize("n_ranks, n_buffers", [(1, 5), (2, 4), (3, 5)])
def test_the_planner_counts_the_sums_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n_ranks: int, n_buffers: int
) -> None:
    """12 grains: sums of 2, 4 and 8 grains on 2 ranks, which add pairs, of 1 too on others, and the mean; in fp32."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(2, "bf16")))
    main(["--config", str(path), "--ranks", str(n_ranks), "--params", "1e6", "--json"])
    row = next(row for row in json.loads(capsys.readouterr().out)["rows"] if row["is_chosen"])
    found, expected = row["phases"]["initialize"]["kinds"]["gradients"], n_buffers * 4e6 / n_ranks
    assert found == pytest.approx(expected, rel=1e-2), (found, expected)
