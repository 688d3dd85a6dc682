"""``same_bits``: losses, norms, weights and states have the same bits on any number of ranks, at every stage."""

from __future__ import annotations

import os
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deepspeed_c
from deepspeed_c import checkpointing
from deepspeed_c.utils import RepeatingLoader, safe_get_full_grad
from tests.hosts import why_no_hosts
from tests.ranks import RanksFailed, run_ranks

Cell = tuple[dict[str, Any], dict[str, Any]]
"""Arguments of the model, and a configuration."""

GRAIN, N_GRAINS, N_STEPS = 2, 12, 6
WORDS, WIDTH, LENGTH = 11, 13, 3
WORLDS = (1, 2, 3, 4, 6)


class Texts(torch.utils.data.Dataset):
    """Sequences of words. Their number is no multiple of the batch."""

    def __len__(self) -> int:
        return 67

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(100 + i))


class Layer(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 29),
            torch.nn.Linear(29, WIDTH),
        )
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Lora(torch.nn.Module):
    """A frozen layer with a trained term of rank 2."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Net(torch.nn.Module):
    """A model of language whose head is tied to its embedding."""

    def __init__(self, *, dropout: float = 0.0, recomputes: bool = False, lora: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.recomputes = recomputes
        if lora:
            self.requires_grad_(False)
            for layer in self.layers:
                layer.up = Lora(layer.up)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = checkpointing.checkpoint(layer, x) if self.recomputes else layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS).float(), words[:, 1:].reshape(-1))


def config_of(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500, **more.pop("zero", {})}
    return {
        "train_batch_size": GRAIN * N_GRAINS,
        "same_bits": {"enabled": True, "grain": GRAIN, "threads": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        "seed": 5,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if dtype == "fp16" else {}),
        **more,
    }


def train(net: dict[str, Any], config: dict[str, Any], n_steps: int = N_STEPS) -> Any:
    """[(loss, norm)] of each step, and the fingerprint of weights and states at the end."""
    engine = deepspeed_c.initialize(model=Net(**net), config=config, training_data=Texts())[0]
    batches, told = iter(RepeatingLoader(engine.training_dataloader)), []
    while engine.global_steps < n_steps:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(next(batches)))
            engine.step()
        told.append((engine._optimizer.last_facts.loss, engine.get_global_grad_norm()))
    found = engine.fingerprint()
    engine.close()
    return told, found


def train_all(rank: int, world: int, cells: list[Cell], n_steps: int = N_STEPS) -> list[Any]:
    return [train(*cell, n_steps) for cell in cells]


def cells_of(group: str, dtype: str, folder: str) -> list[Cell]:
    """Cells whose results have the same bits, for any number of ranks that allows them."""

    def of(stage: int, zero: dict[str, Any] | None = None, net: dict[str, Any] | None = None, **more: Any) -> Cell:
        return net or {}, config_of(stage, dtype, zero=zero or {}, **more)

    if group == "stages":
        return [of(stage) for stage in range(4)]
    if group == "clipping":
        return [of(stage, gradient_clipping=0.05) for stage in range(4)]
    if group == "dropout":
        return [of(stage, net={"dropout": 0.3}) for stage in range(4)]
    if group == "recomputation":
        net = {"dropout": 0.3}
        return [of(0, net=net), *(of(stage, net=net | {"recomputes": True}) for stage in range(4))]
    if group == "lora":
        return [of(stage, net={"lora": True}) for stage in range(4)]
    if group == "offload":
        to_host = {"offload_optimizer": {"device": "cpu"}}
        ahead = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
        weights = to_host | {"offload_param": {"device": "cpu"}}
        return [of(0), *(of(stage, to_host) for stage in (1, 2, 3)), of(2, ahead), of(3, weights)]
    if group == "nvme":
        states = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        weights = states | {"offload_param": {"device": "nvme", "nvme_path": folder}}
        return [of(0), of(1, states), of(2, states), of(3, states), of(3, weights)]
    if group == "gloo":
        return [of(0), *(of(stage, comm={"local": "off"}) for stage in range(4))]
    if group == "copies":
        return [of(0), *(of(3, {"mics_shard_size": n}) for n in (1, 2, 3)), of(3, {"zero_hpz_partition_size": 2})]
    optimizer = {"type": group, "params": {"lr": 1e-2}}
    return [of(stage, optimizer=optimizer, gradient_clipping=0.5) for stage in range(4)]


def mixed_cells(dtype: str, folder: str) -> list[Cell]:
    """Each place and stage once, with dropout and clipping. Recomputation changes no bit."""
    zeros: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (1, {"offload_optimizer": {"device": "cpu"}}),
        (2, {}),
        (3, {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}),
        (3, {"mics_shard_size": 2}),
    ]
    return [
        (
            {"dropout": 0.3, "recomputes": stage > 1},
            config_of(stage, dtype, zero=zero, gradient_clipping=0.05, comm={"local": "off" if stage == 2 else "auto"}),
        )
        for stage, zero in zeros
    ]


def is_possible(cell: Cell, world: int) -> bool:
    zero = cell[1]["zero_optimization"]
    return all(world % zero.get(key, 1) == 0 for key in ("mics_shard_size", "zero_hpz_partition_size"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "group",
    ["stages", "clipping", "dropout", "recomputation", "lora", "offload", "nvme", "gloo", "copies"]
    + ["Lamb", "Lion", "SGD", "Adagrad", "Muon"],
)
def test_bits_do_not_depend_on_ranks_and_places(group: str, dtype: str, tmp_path: Path) -> None:
    cells = cells_of(group, dtype, str(tmp_path))
    expected = run_ranks(1, train_all, cells[:1])[0][0]
    assert len({loss for loss, _ in expected[0]}) > 1, expected
    for world in WORLDS:
        possible = [cell for cell in cells if is_possible(cell, world)]
        for cell, found in zip(possible, run_ranks(world, train_all, possible)[0], strict=True):
            assert found == expected, (cell, world, found, expected)


@pytest.mark.always
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_bits_with_everything_at_once(dtype: str, tmp_path: Path) -> None:
    cells = mixed_cells(dtype, str(tmp_path))
    expected = run_ranks(1, train_all, cells[:1], 3)[0][0]
    for world in (3, 4):
        possible = [cell for cell in cells if is_possible(cell, world)]
        for cell, found in zip(possible, run_ranks(world, train_all, possible, 3)[0], strict=True):
            assert found == expected, (cell, world, found, expected)


def gradients(rank: int, world: int, stage: int) -> dict[str, torch.Tensor]:
    engine = deepspeed_c.initialize(model=Net(), config=config_of(stage, "fp32"), training_data=Texts())[0]
    batches = iter(engine.training_dataloader)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(next(batches)))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    found = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.close()
    return found, norm


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in a binary tree: the left half is the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:left]) + tree_sum(parts[left:])


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_gradients_are_the_sum_in_a_tree_of_plain_torchs(world: int, stage: int) -> None:
    loader = deepspeed_c.data.loader.DeepSpeedDataLoader(
        Texts(), GRAIN, False, 0, None, data_parallel_world_size=1, data_parallel_rank=0, seed=5
    )
    grains, net = iter(loader), Net()
    parts: dict[str, list[torch.Tensor]] = {name: [] for name, _ in net.named_parameters()}
    for _ in range(N_GRAINS):
        net.zero_grad()
        net(next(grains)).backward()
        for name, p in net.named_parameters():
            parts[name].append(p.grad.clone())
    expected = {name: tree_sum(each) * torch.tensor(1 / N_GRAINS) for name, each in parts.items()}
    squares = sum(Fraction(x) ** 2 for grad in expected.values() for x in grad.flatten().tolist())
    for found, norm in run_ranks(world, gradients, stage):
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), (name, found[name], grad)
        assert norm == float(squares) ** 0.5, (norm, float(squares) ** 0.5)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 0, 1, 1)])
def test_two_hosts_have_the_bits_of_one(hosts: tuple[int, ...]) -> None:
    cells = [({}, config_of(stage, "bf16", gradient_clipping=0.05)) for stage in range(4)]
    expected = run_ranks(1, train_all, cells[:1])[0][0]
    for cell, found in zip(cells, run_ranks(len(hosts), train_all, cells, hosts=hosts)[0], strict=True):
        assert found == expected, (cell, found, expected)


def train_and_die(rank: int, world: int, config: dict[str, Any], n_before: int) -> None:
    """Saves after ``n_before`` steps, does another one, and kills a rank within the next window."""
    engine = deepspeed_c.initialize(model=Net(dropout=0.2), config=config, training_data=Texts())[0]
    batches = iter(RepeatingLoader(engine.training_dataloader))
    for step in range(n_before + 2):
        if step == n_before:
            engine.save_checkpoint(config["checkpoint"]["auto_resume"])
        for _ in range(engine.gradient_accumulation_steps()):
            if rank == world - 1 and step > n_before:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward(engine(next(batches)))
            engine.step()


def resume(rank: int, world: int, config: dict[str, Any]) -> Any:
    return train({"dropout": 0.2}, config)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_killed_run_goes_on_with_other_ranks_to_the_bits_of_one_that_did_not_stop(dtype: str, tmp_path: Path) -> None:
    told, expected = run_ranks(2, train_all, [({"dropout": 0.2}, config_of(1, dtype))])[0][0]
    for world, stage in ((4, 2), (3, 3)):
        config = config_of(stage, dtype, checkpoint={"auto_resume": str(tmp_path)})
        with pytest.raises(RanksFailed):
            run_ranks(world, train_and_die, config, 2, fresh=True)
    config = config_of(0, dtype, checkpoint={"auto_resume": str(tmp_path)})
    for rest, found in run_ranks(6, resume, config):
        assert (rest, found) == (told[4:], expected), (rest, told, found, expected)
