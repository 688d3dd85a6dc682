"""GatheredParameters and related functions: tensors are whole inside, edits reach all ranks or none, and all ranks get
the same error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c.errors import StateError
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero import GatheredParameters, register_external_parameter, unregister_external_parameter
from deepspeed_c.zero.weights.param import ZeroParamStatus
from tests import training
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import CLIP, WIDTH, batch
from tests.ranks import on_ranks, run_ranks
from tests.training import descend_together

RELEASED, HERE = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
# UNITS: several gather units, and a parameter that is cut across ranks. HALF_WHOLE: some parameters stay whole too.
UNITS = {"zero_optimization": {"reduce_bucket_size": 60}}
JOINT = {**UNITS, "comm": {"local": "shm", "zero_copy_gather": True}}
HALF_WHOLE = {"zero_optimization": {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 30}}


class Net(nn.Module):
    """Has a trained layer, a frozen layer, a matrix of odd size, a parameter without elements, and a 0-dim
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(7, 5)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x, y):
        out = self.out(self.frozen(torch.tanh(self.inp(x)))) * self.gain
        return (out.float() - y).square().mean()


def make(kind: str, dtype: str = "fp32"):
    """A model that is only sharded ("init"), or a model in an engine: at stage 3, at stage 3 with weights in joint
    memory or with some parameters whole, or at stage 2."""
    torch.manual_seed(7)
    if kind == "init":
        with deepspeed_c.zero.Init():
            return Net(), None
    model = Net()
    kinds = {"engine": (3, UNITS), "joint": (3, JOINT), "half_whole": (3, HALF_WHOLE), "stage_2": (2, UNITS)}
    stage, extra = kinds[kind]
    return model, deepspeed_c.initialize(model=model, config=make_config(stage, dtype, 1, extra))[0]


def plain() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: p.detach().clone() for name, p in Net().named_parameters()}


def check_weights(model: nn.Module, want: dict[str, torch.Tensor], label: str) -> None:
    got = training.whole_weights(model)
    for name, value in want.items():
        assert torch.equal(got[name], value.to(got[name].dtype)), f"{label}, {name}: {got[name]} is not {value}"


def caught(call) -> str:
    try:
        call()
    except StateError as error:
        return str(error)
    raise AssertionError("StateError was not raised")


def statuses(model: nn.Module) -> dict[str, ZeroParamStatus]:
    return {name: p.ds_status for name, p in model.named_parameters()}


# -- reading --------------------------------------------------------------------------------------------------------------


def reading_body(rank: int, world: int, kind: str) -> None:
    model, engine = make(kind)
    want, rest = plain(), statuses(model)
    params = dict(model.named_parameters())
    fresh = nn.Linear(3, 3)
    given = {
        "one": model.inp.weight, "list": [model.inp.weight, model.inp.weight, model.gain],
        "set": set(model.parameters()), "generator": model.parameters(), "dict values": params.values(),
        "state dict": set(model.state_dict(keep_vars=True).values()),
        "mixed": [fresh.weight, model.out.weight, model.table, torch.zeros(2), model.nothing], "empty": [],
        "plain": fresh.weight, "frozen": list(model.frozen.parameters()),
    }  # fmt: skip
    sets = {
        label: list(value) if not torch.is_tensor(value) else [value]
        for label, value in given.items()
        if label != "generator"
    }
    sets["generator"] = list(model.parameters())
    for label, value in given.items():
        names = [n for n, p in params.items() if any(p is q for q in sets[label])]
        with GatheredParameters(value):
            for name in names:
                assert params[name].ds_status is HERE and torch.equal(params[name].data, want[name]), (label, name)
                assert params[name].shape == want[name].shape and params[name].requires_grad == ("frozen" not in name)
        assert statuses(model) == rest, f"{label}: {statuses(model)}"
    # Contexts nest, also over the same parameter. They are left in order, or by an exception.
    with GatheredParameters(model.inp.weight):
        with GatheredParameters(model.parameters(), modifier_rank=None):
            assert set(statuses(model).values()) == {HERE}
        assert model.inp.weight.ds_status is HERE and torch.equal(model.inp.weight.data, want["inp.weight"])
    try:
        with GatheredParameters(model.parameters(), modifier_rank=0):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert statuses(model) == rest
    with GatheredParameters(model.parameters(), enabled=False):
        assert statuses(model) == rest
    context = GatheredParameters(model.parameters())
    for _ in range(2):  # a context may be entered again
        with context:
            check_weights(model, want, "again")
    assert statuses(model) == rest
    check_weights(model, want, "at the end")
    if engine is not None:
        engine.close()


@pytest.mark.parametrize("kind", ["init", "engine", "joint", "half_whole"])
def test_whole_inside_and_as_before_afterwards(kind: str) -> None:
    run_ranks(2, reading_body, kind)
    if kind == "init":
        run_ranks(1, reading_body, kind)
        run_ranks(3, reading_body, kind)


# -- edits with a modifier rank -------------------------------------------------------------------------------------------


def _edit(param: nn.Parameter, how: str, value: torch.Tensor) -> None:
    value = value.to(param.dtype)
    if how == "in place":
        with torch.no_grad():
            param.copy_(value)
    elif how == "data":
        param.data.copy_(value)
    elif how == "replaced":
        param.data = value.clone()
    elif how == "strided":
        param.data = value.t().contiguous().t() if value.dim() == 2 else value.clone()
    elif how == "other dtype":
        param.data = value.double()
    else:  # write to a view of the replaced tensor
        param.data.copy_(value.t() if value.dim() == 2 and value.shape[0] == value.shape[1] else value)
        if value.dim() == 2 and value.shape[0] == value.shape[1]:
            param.data = param.data.t()


def editing_body(rank: int, world: int, kind: str, dtype: str) -> None:
    model, engine = make(kind, dtype)
    params = dict(model.named_parameters())
    want = (
        dict(training.whole_weights(model)) if kind != "stage_2" else {n: p.detach().clone() for n, p in params.items()}
    )
    generator = torch.Generator().manual_seed(3)
    for modifier in range(world):
        for how in ("in place", "data", "replaced", "strided", "other dtype", "turned"):
            values = {n: torch.randn(v.shape, generator=generator) for n, v in want.items()}
            with GatheredParameters(params.values(), modifier_rank=modifier):
                for name, param in params.items():
                    if rank == modifier:
                        _edit(param, how, values[name])
                    elif how == "in place" and rank == 0:
                        _edit(param, how, values[name] + 1)  # edits of another rank are dropped
            label = f"{kind} {dtype}, rank {modifier} {how}"
            check_weights(model, values, label)
            if engine is not None:
                for name, param in params.items():
                    if param.requires_grad:
                        master = safe_get_full_fp32_param(param)
                        expected = values[name].to(param.dtype).float()
                        assert torch.equal(master, expected), f"{label}, master of {name}: {master} is not {expected}"
            want = values
    # All ranks or one rank raise: edits made before the exception are dropped on all ranks.
    for failing in ({0, 1, 2}, {0}, {world - 1}):
        try:
            with GatheredParameters(params.values(), modifier_rank=0):
                for param in params.values():
                    param.data.fill_(5.0 + rank)
                if rank in failing:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert rank in failing
        except StateError as error:
            assert rank not in failing and f"rank {min(failing)} raised" in str(error), error
        else:
            raise AssertionError(f"rank {rank} knows nothing of an exception on {failing}")
        check_weights(model, want, f"{kind} after an exception on {failing}")
    message = ""
    try:
        with GatheredParameters(params.values(), modifier_rank=0):
            if rank == 0:
                model.out.weight.data = torch.zeros(3, 3)
    except StateError as error:
        message = str(error)
    assert "out.weight" in message or "Linear.weight" in message, message
    assert "shape" in message, message
    check_weights(model, want, "after a wrong shape")
    if engine is None:
        return
    # The next forward, and a step, see the edits.
    torch.manual_seed(7)
    twin = Net().to(next(model.parameters()).dtype)
    twin.load_state_dict(want, strict=False)
    x, y = batch(0, 0, 0, 0)
    x = x.to(next(model.parameters()).dtype)
    with torch.no_grad():
        a, b = engine(x, y).item(), twin(x, y).item()
    assert a == b, f"{kind} {dtype}: the loss is {a}, of a plain model {b}"
    training.step(engine, x, y)
    engine.close()


@pytest.mark.parametrize("kind", ["init", "engine", "joint", "half_whole"])
def test_edits_of_the_modifier_rank_reach_everything(kind: str) -> None:
    run_ranks(2, editing_body, kind, "fp32")
    if kind != "init":
        run_ranks(2, editing_body, kind, "bf16")
    else:
        run_ranks(3, editing_body, kind, "fp32")


# -- edits without a modifier rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["init", "engine", "joint", "half_whole"])
@on_ranks(2)
def test_an_edit_without_modifier_rank_raises_on_all_ranks_and_is_not_kept(rank: int, world: int, kind: str) -> None:
    model, engine = make(kind)
    params, want, rest = dict(model.named_parameters()), plain(), statuses(model)

    def attempt(writer: int, param: nn.Parameter, at: int, how: str) -> None:
        with GatheredParameters(params.values()):
            if rank == writer:
                if how == "replaced":
                    param.data = param.data + 1
                elif how == "negative zero":
                    param.data.view(-1)[at] = -0.0 if param.data.view(-1)[at] == 0 else -param.data.view(-1)[at]
                elif how == "swapped":
                    flat = param.data.view(-1)
                    flat[0], flat[at] = flat[at].clone(), flat[0].clone()
                else:
                    param.data.view(-1)[at] += 1e-3

    for writer in range(world):
        for name, at, how in [
            *(("inp.weight", 0, "added"), ("inp.weight", WIDTH * 7 - 1, "added"), ("inp.weight", 40, "swapped")),
            *(("inp.bias", 3, "negative zero"), ("frozen.weight", 17, "added"), ("out.bias", 4, "added")),
            *(("gain", 0, "added"), ("out.weight", 0, "replaced")),
        ]:
            message = caught(lambda: attempt(writer, params[name], at, how))  # noqa: B023
            last = name.rpartition(".")[2]
            assert f"rank {writer}" in message and last in message and "modifier_rank" in message, message
            assert statuses(model) == rest, f"{name} {how}: {statuses(model)}"
            check_weights(model, want, f"{kind}, rank {writer}, {name} {how}")
    # Ranks write to different parameters: all ranks get the same single message.
    with_all = caught(lambda: attempt(rank, (model.inp.bias, model.out.weight)[rank], 0, "added"))
    everyone: list = [None] * world
    torch.distributed.all_gather_object(everyone, with_all)
    assert len(set(everyone)) == 1, everyone
    # The user's exception is raised unchanged, and the edit is dropped.
    try:
        with GatheredParameters(params.values()):
            model.inp.weight.data.zero_()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    check_weights(model, want, "after an exception")
    # The context lies within another context that still holds the parameters.
    with GatheredParameters(params.values()):
        caught(lambda: attempt(0, model.inp.weight, 1, "added"))
        assert torch.equal(model.inp.weight.data, want["inp.weight"]), "the outer context shows the edit"
    check_weights(model, want, "nested")
    if engine is not None:
        x, y = batch(0, 0, rank, 0)
        training.step(engine, x, y)
        engine.close()


# -- external parameters ----------------------------------------------------------------------------------------------------


class Outside(nn.Module):
    """Reads the weight of another module through a list, so no registration announces the read."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(WIDTH, 5)
        self.reader = Reader(self.owner.weight)

    def forward(self, x, y):
        return (self.reader(x) + self.owner.bias - y).square().mean()


class Reader(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(5, 5)
        self.held = [weight]

    def forward(self, x):
        return self.own(torch.nn.functional.linear(x, self.held[0]))


@pytest.mark.parametrize("how", ["before", "after", "fwd_module"])
@on_ranks(2)
def test_external_parameters(rank: int, world: int, how: str) -> None:
    torch.manual_seed(7)
    twin = Outside()
    torch.manual_seed(7)
    model = Outside()
    if how == "before":
        register_external_parameter(model.reader, model.owner.weight)
    engine = deepspeed_c.initialize(model=model, config=make_config(3, "fp32", 1, UNITS))[0]
    if how == "after":
        register_external_parameter(model.reader, model.owner.weight)
    elif how == "fwd_module":
        with GatheredParameters(model.owner.weight, fwd_module=model.reader):
            pass
    with engine:
        optimizer = torch.optim.AdamW(twin.parameters(), **make_config(3, "fp32", 1, {})["optimizer"]["params"])
        for step in range(3):
            x, y = batch(step, 0, 0, 0)
            loss, expected = engine(x, y), twin(x, y)
            assert abs(loss.item() - expected.item()) < 1e-5, f"step {step}: {loss.item()} is not {expected.item()}"
            training.update(engine, loss)
            descend_together(optimizer, [expected], CLIP)
        unregister_external_parameter(model.reader, model.owner.weight)
        assert "not registered" in caught(lambda: unregister_external_parameter(model.reader, model.owner.weight))
        assert "Parameter" in caught(lambda: register_external_parameter(model.reader, torch.zeros(3)))


# -- generation ---------------------------------------------------------------------------------------------------------------


def _hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def _trl_remove_hooks(engine) -> None:
    """The steps of trl before it generates."""
    optimizer_offload = engine.optimizer.parameter_offload
    for param in _all_params(optimizer_offload.module):
        param.ds_active_sub_modules.clear()
    for hook in optimizer_offload.forward_hooks:
        hook.remove()
    for hook in optimizer_offload.backward_hooks:
        hook.remove()
    optimizer_offload.forward_hooks = []
    optimizer_offload.backward_hooks = []


def _all_params(module: nn.Module):
    for each in module.modules():
        yield from each.parameters(recurse=False)


def _trl_add_hooks(engine) -> None:
    optimizer_offload = engine.optimizer.parameter_offload
    optimizer_offload._register_deepspeed_module(optimizer_offload.module)


@pytest.mark.parametrize("way", ["unwrap", "trl"])
@on_ranks(2)
def test_generation_without_hooks(rank: int, world: int, way: str) -> None:
    model, engine = make("engine")
    torch.manual_seed(7)
    twin = Net()
    x, y = batch(0, 0, rank, 0)
    rest = statuses(model)
    assert RELEASED in rest.values()
    with engine:
        losses = []
        for step in range(2):
            n_hooks = _hooks_of(model)
            assert n_hooks > 0
            with torch.no_grad():
                if way == "unwrap":
                    with deepspeed_c.zero.unwrap_model_for_generation(engine) as bare:
                        assert bare is model and _hooks_of(model) == 0
                        twin.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
                        for _ in range(1 + rank):  # ranks may run different numbers of forwards
                            assert bare(x, y).item() == twin(x, y).item()
                else:
                    with GatheredParameters(model.parameters()):
                        _trl_remove_hooks(engine)
                        assert _hooks_of(model) == 0
                        for _ in range(1 + rank):
                            model(x, y)
                        _trl_add_hooks(engine)
            assert _hooks_of(model) == n_hooks, f"{_hooks_of(model)} hooks, before {n_hooks}"
            assert statuses(model) == rest, statuses(model)
            losses.append(training.step(engine, *batch(step, 0, rank, 0)))
        try:
            with deepspeed_c.zero.unwrap_model_for_generation(engine):
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert _hooks_of(model) == n_hooks
    model, engine = make("engine")
    with engine:
        for step, expected in enumerate(losses):
            loss = engine(*batch(step, 0, rank, 0))
            assert loss.item() == expected, f"{way}, step {step}: {expected} with generation, {loss.item()} without"
            training.update(engine, loss)


# -- adapters -------------------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen bf16 base and trained fp32 adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 5).bfloat16().requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, 5, bias=False)

    def forward(self, x, y):
        return (self.base(x.bfloat16()).float() + self.up(self.down(x)) - y).square().mean()


@on_ranks(2)
def test_fp32_adapters_on_a_frozen_bf16_base(rank: int, world: int) -> None:
    torch.manual_seed(7)
    twin = Adapted()
    torch.manual_seed(7)
    model = Adapted()
    engine = deepspeed_c.initialize(model=model, config=make_config(3, "fp32", 1, UNITS))[0]
    with engine:
        assert model.base.weight.ds_tensor.dtype is torch.bfloat16 and model.up.weight.ds_tensor.dtype is torch.float32
        for value, modifier in ((2.0, 0), (3.0, 1)):
            with GatheredParameters(model.parameters(), modifier_rank=modifier):
                assert model.base.weight.dtype is torch.bfloat16 and model.down.weight.dtype is torch.float32
                if rank == modifier:
                    for param in model.parameters():
                        param.data.mul_(value)
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(2).mul_(3)
        check_weights(model, {n: p.detach() for n, p in twin.named_parameters()}, "adapters")
        optimizer = torch.optim.AdamW(
            [p for p in twin.parameters() if p.requires_grad], **make_config(3, "fp32", 1, {})["optimizer"]["params"]
        )
        for step in range(3):
            x, y = batch(step, 0, 0, 0)
            loss, expected = engine(x, y), twin(x, y)
            assert abs(loss.item() - expected.item()) < 1e-4 * expected.item(), (step, loss.item(), expected.item())
            training.update(engine, loss)
            descend_together(optimizer, [expected], CLIP)
        assert torch.equal(training.whole_weights(model)["base.weight"], twin.base.weight)


@on_ranks(2)
def test_does_nothing_below_stage_3(rank: int, world: int) -> None:
    model, engine = make("stage_2")
    with engine, GatheredParameters(model.parameters()):
        assert torch.equal(model.inp.weight.data, plain()["inp.weight"])
        model.inp.weight.data.zero_()  # stage 2 has ordinary parameters: no edit is refused
