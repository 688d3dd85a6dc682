"""recompute/blocks.py: the layers that a section of the configuration selects. Training that recomputes them is
compared with plain torch at stages 0 to 3."""

from __future__ import annotations

import copy
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c import checkpointing
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.engine import training as engine_module
from deepspeed_c.errors import ConfigError
from deepspeed_c.moe.layer import MoE
from deepspeed_c.recompute.blocks import Blocks, find_blocks
from deepspeed_c.zero import GatheredParameters
from tests import toys
from tests.cells import cells
from tests.deepspeed_c.zero.megatron import Mpu
from tests.training import config, engine_of, update, whole_weights

WIDTH, LAYERS, STEPS, ROWS, LR = 13, 4, 3, 3, 0.05


class Block(nn.Module):
    """A layer with submodules, a parameter of its own, a frozen parameter, dropout, and a count of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.n_forwards = 0
        self.fails = False

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, dict]:
        self.n_forwards += 1
        if self.fails:
            raise KeyError("by the test")
        gain = self.gain
        y = nn.functional.dropout(torch.tanh(self.up(x)), 0.2, self.training)
        return x + scale * self.down(y) * gain * self.frozen, {"n": self.n_forwards}


class Model(nn.Module):
    """Blocks. The first is used twice, and two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.others = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x, _ = block(x, scale=0.5)
        if self.fails:
            raise KeyError("by the test")
        return self.out(x).square().mean() + sum(p.sum() * 0 for p in self.others.parameters())


def make_model(flow: str = "plain") -> Model:
    torch.manual_seed(3)
    model = Model()
    if flow == "adapters":
        # Only a few parameters are trained, as with LoRA.
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith((".gain", "out.weight")))
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def seed(step: int, micro: int, rank: int) -> None:
    torch.manual_seed(1000 * step + 10 * micro + rank)


def config_of(stage: int, n_bucket: int, n_live: int, **sections: Any) -> dict[str, Any]:
    zero = {"reduce_bucket_size": n_bucket, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    zero["stage3_max_live_parameters"] = n_live
    return config(stage, lr=LR, zero=zero, gradient_clipping=0.0, **sections)


def trained(rank: int, world: int, stage: int, section: dict | None, flow: str) -> Any:
    model, mpu = make_model(flow), None
    if flow == "tensor parallel":
        # Two neighbouring ranks hold one model together and get the same rows.
        mpu, rank = Mpu(2), rank // 2
    config = config_of(stage, WIDTH * 29, WIDTH * 60, gradient_accumulation_steps=2)
    if section is not None:
        config["activation_checkpointing"] = section
    losses, kinds = [], []
    params = list(model.parameters())
    with deepspeed_c.initialize(model=model, model_parameters=params, config=config, mpu=mpu)[0] as engine:
        if mpu is not None and section is not None:
            assert engine._blocks.recomputer._comm.world_size == 2
        for step in range(STEPS):
            if flow == "evaluates":
                engine.eval()
                with torch.no_grad():
                    engine(batch(90 + step, rank))
                engine.train()
            if flow == "fails in forward" and step == 1:
                model.fails = True
                with pytest.raises(KeyError):
                    engine(batch(step, rank))
                model.fails = False
            if flow == "fails in backward" and step == 1 and section is not None:
                loss = engine(batch(step, rank))
                model.blocks[1].fails = True  # the block fails when it is recomputed
                with pytest.raises(KeyError):
                    engine.backward(loss)
                model.blocks[1].fails = False
            for micro in range(2):
                seed(step, micro, rank)
                loss = engine(batch(2 * step + micro, rank))
                losses.append(loss.item())
                if flow == "two backwards":
                    engine.backward(0.25 * loss, retain_graph=True)
                    engine.backward(0.75 * loss)
                else:
                    engine.backward(loss)
                engine.step()
        counts = [block.n_forwards for block in model.blocks]
        kinds = [type(block) is Block for block in model.blocks]
        if stage == 3:
            assert engine._fetcher.stats.live_elems == 0
        with GatheredParameters(params):
            weights = [p.detach().clone() for p in params]
    assert all(type(block) is Block for block in model.blocks), "closed"
    return losses, weights, counts, kinds


def expected(world: int, flow: str) -> tuple[list[list[float]], list[torch.Tensor]]:
    model, losses = make_model(flow), [[] for _ in range(world)]
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            for micro in range(2):
                seed(step, micro, rank)
                loss = model(batch(2 * step + micro, rank))
                losses[rank].append(loss.item())
                (loss / (2 * world)).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p -= LR * p.grad
    return losses, [p.detach() for p in model.parameters()]


# The files have no names in this folder.
FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
SECTIONS = {
    "hooks": {"layers": "auto"},
    "reentrant": {"layers": r"blocks\.\d+", "use_reentrant": True},
    "checked": {"layers": "auto", "check": True},
    "partitioned": {"layers": "auto", "partition_activations": True},
    "contiguous": {"layers": "auto", "partition_activations": True, "contiguous_memory_optimization": True},
    "host": {"layers": "auto", "cpu_checkpointing": True},
    # Some layers are kept, of others some operators are kept, and the rest is recomputed.
    "budget": {"layers": "auto", "budget": 3000},
    "files": {"layers": "auto", "offload": FILES},
    "reentrant files": {"layers": r"blocks\.\d+", "use_reentrant": True, "offload": FILES | {"max_in_cpu": 300}},
    "budget and files": {"layers": "auto", "budget": 3000, "offload": FILES},
}
SECTIONS |= {
    f"reentrant {name}": {**SECTIONS[name], "use_reentrant": True}
    for name in ("partitioned", "contiguous", "host", "budget", "budget and files")
}
PARTITIONED = ("partitioned", "contiguous", "reentrant partitioned", "reentrant contiguous")


def check(run_ranks: Callable, world: int, stage: int, name: str, flow: str) -> None:
    n_tensor = 2 if flow == "tensor parallel" else 1
    want_losses, want = expected(world // n_tensor, flow)
    plain = run_ranks(world, trained, stage, None, flow)
    # If a reentrant layer is used twice, its gradients are added in another order. So are gradients of a second
    # backward at stage 3, because buckets follow the order in which weights are used.
    is_exact = not name.startswith("reentrant") and not (flow == "two backwards" and stage == 3)
    for rank, (losses, weights, counts, kinds) in enumerate(run_ranks(world, trained, stage, SECTIONS[name], flow)):
        wanted = want_losses[rank // n_tensor]
        assert losses == pytest.approx(wanted, rel=2e-5), (rank, losses, wanted)
        for i, (a, b, c) in enumerate(zip(weights, want, plain[rank][1], strict=True)):
            assert torch.allclose(a, b, rtol=2e-5, atol=2e-6), f"rank {rank}, {i}: {(a - b).abs().max():g} apart"
            assert not is_exact or torch.equal(a, c), f"rank {rank}, {i}: {(a - c).abs().max():g} apart"
        assert (not is_exact or losses == plain[rank][0]) and not any(kinds) and all(plain[rank][3])
        assert all(a > b for a, b in zip(counts, plain[rank][2])), (counts, plain[rank][2])


@pytest.mark.parametrize(
    ("name", "stage"), cells([name for name in SECTIONS if "partitioned" not in name], (0, 1, 2, 3), at_once=1)
)
def test_training_is_that_of_plain_torch(run_ranks: Callable, name: str, stage: int) -> None:
    check(run_ranks, 2, stage, name, "plain")


@pytest.mark.parametrize(
    ("flow", "name", "stage"),
    cells(
        ("two backwards", "evaluates", "fails in forward", "fails in backward"), ("hooks", "reentrant", "files"), (2, 3)
    ),
)
def test_other_flows(run_ranks: Callable, flow: str, name: str, stage: int) -> None:
    check(run_ranks, 2, stage, name, flow)


@pytest.mark.parametrize(("name", "stage"), [("files", 3), ("budget", 3), ("hooks", 2)])
def test_adapters_in_a_frozen_model(run_ranks: Callable, name: str, stage: int) -> None:
    check(run_ranks, 2, stage, name, "adapters")


@pytest.mark.parametrize(("name", "stage"), cells(PARTITIONED, (0, 1, 2, 3), at_once=1))
def test_partitioned_over_tensor_parallel_ranks(run_ranks: Callable, name: str, stage: int) -> None:
    check(run_ranks, 4, stage, name, "tensor parallel")


def no_room_body(rank: int, world: int, folder: str) -> str:
    settings = config(
        lr=LR, activation_checkpointing={"layers": "auto", "offload": {"device": "nvme", "nvme_path": folder}}
    )
    model, room = make_model(), SimpleNamespace(f_bavail=1000 if rank else 1 << 40, f_frsize=1)
    try:
        with mock.patch.object(os, "fstatvfs", lambda descriptor: room):
            deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_device_that_one_rank_finds_full_is_an_error_on_all(run_ranks: Callable, tmp_path: Path) -> None:
    for text in run_ranks(2, no_room_body, str(tmp_path)):
        assert "cannot be reserved, 1000 " in text and "activation_checkpointing.offload.nvme_path" in text, text


def profile_body(rank: int, world: int, folder: str) -> list[str]:
    settings = config(
        lr=LR,
        steps_per_print=2,
        activation_checkpointing={"layers": "auto", "profile": True, "profile_path": folder, "offload": FILES},
    )
    model, said = make_model(), []
    original = engine_module.log_dist
    engine_module.log_dist = lambda text, **more: said.append(text)
    try:
        with engine_of(model, settings) as engine:
            for step in range(4):
                update(engine, engine(batch(step, rank)))
    finally:
        engine_module.log_dist = original
    return [text for text in said if text.startswith("recomputed layers")]


def test_the_profile_is_told_every_so_many_steps(run_ranks: Callable, tmp_path: Path) -> None:
    tables = run_ranks(1, profile_body, str(tmp_path))[0]
    assert len(tables) == 2
    for table in tables:
        rows = [line.split() for line in table.splitlines()[2:]]
        assert [row[0] for row in rows] == [f"blocks.{i}" for i in range(LAYERS)], table
        assert [int(row[1]) for row in rows] == [4, 2, 2, 2], table  # the first block is used twice
    found = json.loads((tmp_path / "activations.json").read_text())
    assert found["step"] == 4 and set(found["layers"]) == {f"blocks.{i}" for i in range(LAYERS)}
    layer = found["layers"]["blocks.1"]
    assert layer["n"] == 2 and layer["recompute_ns"] > 0, layer
    assert layer["bytes_kept"] + layer["bytes_moved"] == 2 * ROWS * WIDTH * 4, layer
    picture = ElementTree.parse(tmp_path / "activations.svg").getroot()
    assert sum(each.text == "blocks.2" for each in picture.iter("{http://www.w3.org/2000/svg}text")) == 1


def saved_body(rank: int, world: int, stage: int, section: dict) -> int:
    """The bytes that autograd saves in one forward, without weights."""
    model, saved = make_model(), []
    weights = {id(p) for p in model.parameters()}
    settings = config(stage, lr=LR, zero={"stage3_param_persistence_threshold": 0}, activation_checkpointing=section)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in weights and tensor.shape[-1] in (WIDTH, 29) and tensor.shape[0] == 50:
            saved.append(tensor.nbytes)
        return tensor.detach()

    with engine_of(model, settings) as engine:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = engine(torch.randn(50, WIDTH))
        update(engine, loss)
    return sum(saved)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_saves_its_layers_inputs_only(run_ranks: Callable, stage: int) -> None:
    row = 50 * 4  # bytes of a column
    outside = 2 * WIDTH  # the inputs of the layers before and after the blocks
    for n_bytes in run_ranks(2, saved_body, stage, {"layers": "auto"}):
        assert n_bytes == row * (WIDTH * (LAYERS + 1) + outside), n_bytes
    for n_bytes in run_ranks(2, saved_body, stage, {}):
        assert n_bytes > 5 * row * WIDTH * (LAYERS + 1), n_bytes


class Calls(nn.Module):
    """Calls ``checkpoint`` itself: nested, and with weights as arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.linspace(0.5, 2, WIDTH))
        self.is_plain = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def call(function: Callable, *args: Any) -> Any:
            return function(*args) if self.is_plain else checkpointing.checkpoint(function, *args)

        def inner(t: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            return call(self.blocks[1], call(self.blocks[0], t).tanh() * gain)

        x = call(lambda t, gain: call(inner, t, gain) * gain.exp(), x, self.gain)
        return (
            call(lambda t, w: (t @ w.t()).tanh() @ w, x, self.blocks[2].weight).square().mean()
            + self.blocks[2].bias.sum()
        )


def loss_of(model: Callable, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def run(rank: int, world: int, stage: int, section: dict, kind: type, loss_of: Callable, n_elems: int) -> Any:
    """(losses, weights) of an engine whose buckets have ``n_elems`` elements."""
    model = kind()
    settings = config_of(stage, n_elems, n_elems, activation_checkpointing=section)
    with engine_of(model, settings) as engine:
        losses = [update(engine, loss_of(engine, batch(step, rank))) for step in range(STEPS)]
        return losses, list(whole_weights(model).values())


def check_run(run_ranks: Callable, stage: int, section: dict, kind: type, loss_of: Callable, n_elems: int) -> None:
    """Compares an engine over two ranks with plain torch."""
    world, model, losses = 2, kind(), [[], []]
    model.is_plain = True
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world):
            loss = loss_of(model, batch(step, rank))
            losses[rank].append(loss.item())
            (loss / world).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
    for rank, (got, weights) in enumerate(run_ranks(world, run, stage, section, kind, loss_of, n_elems)):
        assert got == pytest.approx(losses[rank], rel=2e-5)
        for i, (a, b) in enumerate(zip(weights, model.parameters(), strict=True)):
            assert torch.allclose(a, b, rtol=2e-5, atol=2e-6), f"rank {rank}, {i}: {(a - b).abs().max():g} apart"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("section", [{}, {"check": True}, {"use_reentrant": True}], ids=["hooks", "check", "reentrant"])
def test_a_model_that_calls_checkpoint(run_ranks: Callable, section: dict, stage: int) -> None:
    check_run(run_ranks, stage, section, Calls, loss_of, WIDTH * WIDTH)


def smooth() -> nn.Module:
    """Layers whose output can be differentiated twice."""
    torch.manual_seed(5)
    return toys.Stack(3, lambda: toys.Mlp(WIDTH, 29, adds=True), torch.tanh)


def penalized(model: Callable, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_penalty(run_ranks: Callable, stage: int) -> None:
    check_run(run_ranks, stage, {"layers": "auto"}, smooth, penalized, WIDTH * 30)


def engines_body(rank: int, world: int) -> list[int]:
    """Two engines exist at once. One recomputes, the other does not."""
    counts = []
    models = [make_model() for _ in range(2)]
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": LR}}}
    sections = [{"activation_checkpointing": {"layers": "auto"}}, {}]
    engines = [engine_of(m, {**base, **s}) for m, s in zip(models, sections)]
    for engine in engines:
        seed(0, 0, rank)
        update(engine, engine(batch(0, rank)))
    counts = [model.blocks[1].n_forwards for model in models]
    same = [torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models))]
    for engine in engines:
        engine.close()
    assert all(same)
    return counts


def test_two_engines_differ(run_ranks: Callable) -> None:
    assert run_ranks(1, engines_body) == [[2, 1]]


def test_what_auto_finds() -> None:
    assert find_blocks(make_model(), "auto") == [f"blocks.{i}" for i in range(LAYERS)]
    assert find_blocks(make_model(), "repeated") == find_blocks(make_model(), "auto")
    assert find_blocks(nn.ModuleList(nn.Linear(1, 1) for _ in range(2)), "auto") == ["0", "1"]
    mixed = nn.Module()
    mixed.layers = nn.ModuleList([nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)])
    for model in (nn.Linear(1, 1), mixed, nn.ModuleList([nn.Linear(1, 1)])):
        with pytest.raises(ConfigError, match=r'(?s)"auto" finds no repeated blocks.*regular expression'):
            find_blocks(model, "auto")


class Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


class Experts(nn.Module):
    """A layer whose list of experts is longer than the list of layers and has most of the weights."""

    def __init__(self, n_experts: int) -> None:
        super().__init__()
        self.attention, self.experts = nn.Linear(8, 8), nn.ModuleList(Mlp(8) for _ in range(n_experts))


class Level(nn.Module):
    """Blocks of one width, as in models of images whose resolution falls level by level."""

    def __init__(self, width: int, n_blocks: int) -> None:
        super().__init__()
        self.blocks, self.down = nn.ModuleList(Mlp(width) for _ in range(n_blocks)), nn.Linear(width, 2 * width)


def lists(**of_name: list[nn.Module]) -> nn.Module:
    model = nn.Module()
    for name, modules in of_name.items():
        model.add_module(name, nn.ModuleList(modules))
    return model


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        # Every other layer has more experts, and heads follow the layers.
        (lambda: lists(layers=[Experts(8 + i % 2) for i in range(4)], heads=[nn.Linear(8, 99)] * 9), ["layers"] * 4),
        (
            lambda: lists(encoder=[Mlp(4) for _ in range(2)], decoder=[Mlp(40) for _ in range(3)]),
            ["encoder", "decoder"],
        ),
        (lambda: lists(small=[nn.Linear(4, 4) for _ in range(4)], large=[nn.Linear(40, 40)] * 2), ["small", "large"]),
        (lambda: lists(levels=[Level(4, 2), Level(8, 1), Level(16, 3)]), ["levels.0.blocks", "levels.2.blocks"]),
        (lambda: lists(levels=[Level(4, 2), Level(4, 3), Level(4, 3)]), ["levels"]),
        # No two layers are alike, and their lists of experts are still no blocks.
        (lambda: lists(layers=[MoE(8, Mlp(8), n_experts) for n_experts in (2, 4, 8)]), ["layers"]),
        (lambda: lists(layers=[MoE(8, Mlp(8), 4)]), ["layers.0.deepspeed_moe.experts.deepspeed_experts"]),
    ],
)
def test_auto_takes_all_outermost_blocks(model: Callable, wanted: list[str]) -> None:
    made = model()
    names = [f"{name}.{i}" for name in dict.fromkeys(wanted) for i in range(len(made.get_submodule(name)))]
    found = find_blocks(made, "auto")
    assert found == names, (found, names)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_compiled_without_a_break(use_reentrant: bool) -> None:
    torch.manual_seed(2)
    # Without side effects, because a compiler would not repeat side effects.
    model = toys.Stack(3, lambda: toys.Mlp(WIDTH, 29, adds=True), lambda y: y.square().sum())
    x = torch.randn(2, WIDTH)
    want = [p.grad for p in differentiated(model, model(x))]
    blocks = Blocks(model, ActivationCheckpointing(layers="auto", use_reentrant=use_reentrant))
    got = [p.grad for p in differentiated(model, torch.compile(model, backend="aot_eager", fullgraph=True)(x))]
    blocks.close()
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7), (a - b).abs().max()


def differentiated(model: nn.Module, loss: torch.Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    loss.backward()
    return list(model.parameters())


def test_patterns() -> None:
    assert find_blocks(make_model(), r"blocks\.[13]|inp") == ["inp", "blocks.1", "blocks.3"]
    with pytest.raises(ConfigError, match=r"'blocks.7' fits the whole name of none of the model's \d+ modules \(inp, "):
        find_blocks(make_model(), "blocks.7")
    with pytest.raises(ConfigError, match="no regular expression"):
        find_blocks(make_model(), "blocks.(")


def test_hooks_copies_and_pickles_of_a_recomputed_layer() -> None:
    model = make_model()
    block, calls = model.blocks[1], []
    block.register_forward_pre_hook(lambda *_: calls.append("before"))
    blocks = Blocks(model, ActivationCheckpointing(layers=r"blocks\.1"))
    assert isinstance(block, Block) and type(block) is not Block and type(block).__name__ == "Block"
    block(torch.randn(2, WIDTH))[0].sum().backward()
    assert block.n_forwards == 2 and calls == ["before"] * 2
    block._forward_pre_hooks.clear()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(other) is Block
        assert torch.equal(other.gain, block.gain)
    assert list(model.state_dict()) == list(make_model().state_dict())
    blocks.close()
    assert type(block) is Block


def test_the_last_of_two_engines_recomputes_and_no_order_of_closing_matters() -> None:
    for first_closes_first in (True, False):
        model = make_model()
        both = [Blocks(model, ActivationCheckpointing(layers="auto")) for _ in range(2)]
        model.blocks[0](torch.randn(2, WIDTH))[0].sum().backward()
        assert model.blocks[0].n_forwards == 2, "not recomputed within one another"
        for i, blocks in enumerate(both if first_closes_first else both[::-1]):
            blocks.close()
            assert (type(model.blocks[0]) is Block) == (i == 1 or not first_closes_first)


def test_one_arena_without_what_it_needs_is_an_error_where_layers_are_named() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    with pytest.raises(ConfigError, match="partition_activations"):
        Blocks(model, ActivationCheckpointing(layers="auto", contiguous_memory_optimization=True))
    # Users copy this configuration. It does nothing in DeepSpeed either.
    Blocks(model, ActivationCheckpointing(contiguous_memory_optimization=True)).close()
