"""Values that stages send each other, their precision, and errors for input that does not fit."""

from __future__ import annotations

import pickle
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import ConfigError, FeatureError, ModelError, StateError
from deepspeed_c.pipe import LayerSpec, PipelineModule
from deepspeed_c.pipe.link import RemoteLink, _Form, _pickle_form
from tests.deepspeed_c.pipe.models import WIDTH, Block, Plain, loss_fn, micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import config_of
from tests.ranks import run_ranks
from tests.training import descend, engine_of


def build(stages: int, config: dict[str, Any], **options: Any) -> Any:
    net = module_of(stages, **options)
    return engine_of(net, config)


def train_bf16(rank: int, world: int, schedule: str, dtype: str) -> tuple[list[float], int]:
    more = {"bf16": {"enabled": True}} if dtype == "bf16" else {"fp16": {"enabled": True, "initial_scale_power": 4}}
    with build(world, config_of(4, **more), schedule=schedule, tied=False) as engine:
        losses = [float(engine.train_batch(iter(micro_batches(0, 0, 4)))) for _ in range(4)]
        return losses, engine.skipped_steps


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_sixteen_bits_cut_nothing(schedule, dtype):
    """Two stages give the same bits as one, because values are sent in their own dtype. (Gradients of tied weights
    would be added in another order.)"""
    one = run_ranks(1, train_bf16, "1f1b", dtype)[0]
    for got in run_ranks(2, train_bf16, schedule, dtype):
        assert got == one
    assert one[0][-1] < one[0][0]


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "value",
    [None, 3, (), {}, [torch.ones(2)], {"a": (1, [torch.ones(1), None]), "b": Pair(torch.zeros(0), "x")}],
    ids=repr,
)
def test_a_form_comes_over_in_silence(value):
    """To unpickle torch's own class for a leaf raises a warning, which would appear in the log of each run."""
    leaves, spec = tree_flatten(value)
    form = _Form.of(leaves, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        came = pickle.loads(_pickle_form(form))
    assert came == form and came.spec == spec, (came, form)


def overflow(rank: int, world: int) -> tuple[list[int], list[float], list[float]]:
    """The loss scale begins too large. All stages skip the same steps and reach the same scale."""
    config = config_of(2, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    skipped, scales = [], []
    with build(world, config) as engine:
        before = [p.detach().clone() for p in engine.module.parameters()]
        for step in range(3):
            engine.train_batch(iter(micro_batches(step, 0, 2)))
            skipped.append(engine.skipped_steps)
            scales.append(engine.optimizer.cur_scale)
        assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    return skipped, scales


def test_all_stages_skip_together():
    outcomes = run_ranks(2, overflow)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == [1, 2, 3]


class Many(nn.Module):
    """Its input and output are nested: a tensor, the same tensor again, a mask, a number that changes, None and
    text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)

    def forward(self, value):
        if torch.is_tensor(value):
            value = {"x": value, "again": value, "mask": value[..., 0] > 0, "n": 0, "none": None, "text": "a"}
        assert (value["none"], value["text"]) == (None, "a" + "b" * value["n"])
        x = self.block(value["x"]) * value["mask"].unsqueeze(-1) + value["again"]
        return {**value, "x": x, "n": value["n"] + 1, "text": value["text"] + "b"}


def take_x(value):
    return value["x"]


def many_layers() -> list[Any]:
    return [*(LayerSpec(Many, WIDTH) for _ in range(4)), take_x]


def squares(outputs, labels):
    return (outputs.float() - labels).square().mean()


SHAPES = [(2, 3), (2, 3), (2, 7), (2, 1), (2, 3)]


def float_batches(step: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(*s, WIDTH, generator=generator), torch.randn(*s, WIDTH, generator=generator)) for s in SHAPES]


def train_many(rank: int, world: int, schedule: str) -> list[float]:
    net = PipelineModule(many_layers(), num_stages=world, loss_fn=squares, seed_layers=True, schedule=schedule)
    engine = engine_of(net, config_of(len(SHAPES)))
    with engine:
        return [float(engine.train_batch(iter(float_batches(step)))) for step in range(3)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_any_nest_whose_shapes_change(schedule):
    layers = nn.Sequential()
    for i in range(4):
        torch.manual_seed(1234 + i)
        layers.append(Many(WIDTH))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        batches = float_batches(step)
        loss = sum(squares(layers(x)["x"], y) for x, y in batches) / len(batches)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for got in run_ranks(2, train_many, schedule):
        assert got == pytest.approx(expected, rel=1e-5)


def evaluate(rank: int, world: int, schedule: str) -> Any:
    with build(world, config_of(3), schedule=schedule) as engine:
        batches = micro_batches(7, 0, 3)
        mean = engine.eval_batch(iter(batches))
        total = engine.eval_batch(iter(batches), reduce_output="sum")
        each = engine.eval_batch(iter(batches), reduce_output=None, bcast_loss=False)
        logits = engine.eval_batch(iter((x, None) for x, _ in batches), compute_loss=False)
        both = engine.eval_batch(iter(batches), return_logits=True, num_micro_batches=2)
        trained = float(engine.train_batch(iter(batches)))
        return float(mean), total, each, logits, both, trained, engine.is_last_stage()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved"])
def test_eval_batch(schedule):
    model = Plain()
    batches = micro_batches(7, 0, 3)
    with torch.no_grad():
        expected_logits = [model(x) for x, _ in batches]
        losses = [loss_fn(out, y).item() for out, (_, y) in zip(expected_logits, batches, strict=True)]
    for mean, total, each, logits, both, trained, is_last in run_ranks(2, evaluate, schedule):
        assert mean == pytest.approx(sum(losses) / 3, rel=1e-5) == trained
        assert float(both[0]) == pytest.approx(sum(losses[:2]) / 2, rel=1e-5)
        assert (total is None, each is None, logits is None, both[1] is None) == (not is_last,) * 4
        if is_last:
            assert float(total) == pytest.approx(sum(losses), rel=1e-5)
            assert [float(loss) for loss in each] == pytest.approx(losses, rel=1e-5)
            assert len(both[1]) == 2
            for got, wanted in zip(logits, expected_logits, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def train_variant(rank: int, world: int, variant: str) -> list[float]:
    options: dict[str, Any] = {}
    if variant == "recomputed":
        options = {"activation_checkpoint_interval": 2, "schedule": "zb_h1"}
    elif variant == "listed":
        options = {"partition_method": [0, 1, 9]}
    elif variant == "by class":
        options = {"partition_method": "type:block"}
    net = module_of(world, tied=False, **options)
    if variant == "frozen":
        for name, param in net.named_parameters():
            param.requires_grad_(int(name.split(".")[0]) >= 3)
    params = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed_c.initialize(model=net, model_parameters=params, config=config_of(3))
    with engine:
        return [float(engine.train_batch(iter(micro_batches(step, 0, 3)))) for step in range(3)]


@pytest.mark.parametrize("variant", ["plain", "recomputed", "listed", "by class", "frozen"])
def test_variants(variant):
    one = run_ranks(1, train_variant, "frozen" if variant == "frozen" else "plain")[0]
    for got in run_ranks(2, train_variant, variant):
        assert got == pytest.approx(one, rel=1e-5), f"{got} and {one}"


class Shared(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight


def train_shared(rank: int, world: int) -> tuple[list[float], list[str]]:
    """The first and the last layer are the same module object."""
    torch.manual_seed(5)
    both = nn.Linear(WIDTH, WIDTH)
    layers = [both, *(Block(WIDTH) for _ in range(3)), both]
    net = PipelineModule(layers, num_stages=world, loss_fn=squares)
    engine = engine_of(net, config_of(len(SHAPES)))
    with engine:
        losses = [float(engine.train_batch(iter(float_batches(step)))) for step in range(3)]
        return losses, [name for name, _ in net.named_parameters()]


def test_a_module_in_two_places_is_tied():
    torch.manual_seed(5)
    both = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(both, *(Block(WIDTH) for _ in range(3)), both)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = [
        descend(optimizer, sum(squares(model(x), y) for x, y in float_batches(step)) / len(SHAPES)) for step in range(3)
    ]
    outcomes = run_ranks(2, train_shared)
    for losses, names in outcomes:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "tied_modules.0.weight" in names


def wrong(rank: int, world: int, what: str) -> str:
    config = config_of(2)
    try:
        if what == "too few layers":
            module_of(2, partition_method="type:Conv")
        elif what == "a shared parameter":
            first = nn.Linear(4, 4, bias=False)
            PipelineModule([first, Shared(first.weight)], num_stages=2, loss_fn=squares)
        elif what == "nothing to train":
            net = module_of(2, tied=False)
            for param in net.parameters():
                param.requires_grad_(False)
            deepspeed_c.initialize(model=net, model_parameters=net.parameters(), config=config)
        elif what == "schedule":
            build(2, config_of(2, pipeline={"schedule": "zb_v"}))
        elif what == "no such schedule":
            build(2, config_of(2, pipeline={"schedule": "zb_h2"}))
        else:
            with build(2, config) as engine:
                if what == "ends early":
                    engine.train_batch(iter(micro_batches(0, 0, 2 - rank)))
                elif what == "forward":
                    engine(torch.zeros(1))
                elif what == "not a pair":
                    engine.train_batch(iter([1, 2]))
                elif what == "vector loss":
                    engine.module.loss_fn = lambda outputs, labels: outputs
                    engine.train_batch(iter(micro_batches(0, 0, 2)))
    except (ConfigError, FeatureError, ModelError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("too few layers", ("matches 0 layers", "2 stages", "Block")),
        ("a shared parameter", ("layers 0 and 1", "TiedLayerSpec")),
        ("nothing to train", ("ModelError", "no parameter to train")),
        ("schedule", ("'zb_v'", "'1f1b'", "PipelineModule(schedule='zb_v'")),
        ("no such schedule", ("zb_h2", "zb_h1")),
        ("ends early", ("StateError", "rank 1", "after 1 of 2 micro-batches")),
        ("forward", ("train_batch",)),
        ("not a pair", ("(inputs, labels)",)),
    ],
)
def test_refusals_come_on_all_ranks(what, words):
    for text in run_ranks(2, wrong, what):
        for word in words:
            assert word in text, text


N_VALUES, N_BATCHES = 5, 4


def reuse_buffers(rank: int, world: int, wish: str, numel: int) -> list[int]:
    """Batches of values, more under way than the sender waits for. The receiver keeps the tensors of all batches while
    the sender uses its buffers again. Returns the bytes of the sender's buffers after each batch.
    """
    comm = Collectives()
    comm.use_shared_memory(wish)
    link = RemoteLink(comm, 0, 1, 7, torch.device("cpu"))
    sizes, received = [], []
    for batch in range(N_BATCHES):
        if rank == 0:
            comm.barrier()
        for i in range(N_VALUES):
            number = N_VALUES * batch + i
            if rank == 0:
                value = torch.full((numel,), float(number))
                link.send([value, number], f"value {number}")
                value.fill_(-1.0)  # a sent tensor may be overwritten at once
        if rank == 1:
            comm.barrier()
            for i in range(N_VALUES):
                link.post(f"value {N_VALUES * batch + i}")
            received += [link.take() for _ in range(N_VALUES)]
        link.flush()
        sizes.append(comm.outgoing.n_bytes)
    for number, (value, told) in enumerate(received):
        assert told == number
        assert torch.equal(value, torch.full((numel,), float(number)))
    assert len(received) == (N_BATCHES * N_VALUES if rank else 0)
    comm.close()
    assert comm.outgoing.n_bytes == 0
    return sizes


@pytest.mark.parametrize("wish", ["shm", "off"])
@pytest.mark.parametrize("numel", [0, 1021, 300_007])
def test_buffers_of_sent_values_are_used_again_only_when_the_values_have_been_taken(wish, numel):
    sent, received = run_ranks(2, reuse_buffers, wish, numel)
    assert len(set(sent)) == 1 and sent[0] >= 4 * numel
    assert set(received) == {0}
