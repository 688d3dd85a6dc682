"""The optimizer that ``initialize`` returns is of DeepSpeed's class for the stage and precision. At stage 0 in fp32 it
is the caller's optimizer itself."""

import copy
import warnings

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import OptimizerError, StateError
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.zero.states import kinds
from deepspeed_c.zero.states.optimizer import DeepSpeedOptimizer
from tests import training
from tests.ranks import on_ranks, run_ranks
from tests.training import descend

NAMES = (
    *("BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "FP16_Optimizer"),
    *("FP16_UnfusedOptimizer", "ZeROOptimizer"),
)
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, sums in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
# What DeepSpeed 0.19.6 returns: (stage, precision, base optimizer) -> the class, or None for the base optimizer itself.
# DeepSpeed refuses stage 0 with sums in fp32.
ADAM, SGD = "AdamW of the configuration", "SGD of the caller"
THEIRS = {
    **{(0, "fp32", base): None for base in (ADAM, SGD)},
    **{(0, precision, ADAM): "FP16_Optimizer" for precision in ("bf16", "fp16")},
    **{(0, precision, SGD): "FP16_UnfusedOptimizer" for precision in ("bf16", "fp16")},
    **{
        (stage, precision, base): "DeepSpeedZeroOptimizer"
        for stage in (1, 2)
        for precision in PRECISIONS
        for base in (ADAM, SGD)
        if (stage, precision) != (1, "bf16, sums in fp32")
    },
    **{(1, "bf16, sums in fp32", base): "BF16_Optimizer" for base in (ADAM, SGD)},
    **{(3, precision, base): "DeepSpeedZeroOptimizer_Stage3" for precision in PRECISIONS for base in (ADAM, SGD)},
}
OF_ZERO = {"BF16_Optimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"}


@on_ranks(1)
def test_isinstance_is_that_of_deepspeed(rank, world):
    for (stage, precision, base), theirs in THEIRS.items():
        model = torch.nn.Linear(8, 8)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **PRECISIONS[precision]}
        given = None
        if base == SGD:
            given = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
        engine, optimizer, *_ = deepspeed_c.initialize(model=model, optimizer=given, config=config)
        case = stage, precision, base
        assert optimizer is engine.optimizer, case
        found = {name for name in NAMES if isinstance(optimizer, getattr(kinds, name))}
        expected = (
            set()
            if theirs is None
            else {theirs} | ({"ZeROOptimizer"} & ({"ZeROOptimizer"} if theirs in OF_ZERO else set()))
        )
        assert found == expected, (case, found, expected)
        assert isinstance(optimizer, DeepSpeedOptimizer) == (theirs is not None), case
        held = optimizer if theirs is None else optimizer.optimizer
        assert held is engine.basic_optimizer and isinstance(held, torch.optim.Optimizer), case
        assert held is given if given is not None else isinstance(held, FusedAdam), (case, type(held))
        engine.close()


@on_ranks(1)
def test_offload_makes_it_another_class(rank, world):
    config = training.config(
        1, "AdamW", zero={"offload_optimizer": {"device": "cpu"}}, **PRECISIONS["bf16, sums in fp32"]
    )
    engine, optimizer, *_ = deepspeed_c.initialize(model=torch.nn.Linear(8, 8), config=config)
    assert type(optimizer) is kinds.DeepSpeedZeroOptimizer
    engine.close()


# -- stage 0 in fp32 ----------------------------------------------------------------------------------------------------

STEPS = 3
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 0}}
BASES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01),
}


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def groups_of(model):
    # The order differs from the model's, so the numbers of parameters in a state dict show which order was used.
    params = list(model.parameters())
    return [{"params": [params[3], params[0]], "weight_decay": 0.1}, {"params": [params[2], params[1]]}]


def loss_of(model, step, rank):
    x = torch.arange(7.0).mul(0.1).add(step + rank).sin()
    return model(x).square().sum()


def plain(name, world):
    """The same training in plain torch. Returns the state dict and the weights."""
    model = make_model()
    optimizer = BASES[name](groups_of(model))
    for step in range(STEPS):
        descend(optimizer, sum(loss_of(model, step, rank) for rank in range(world)).div(world))
    return optimizer.state_dict(), [p.detach().clone() for p in model.parameters()]


def flat(state_dict):
    state = state_dict["state"]
    return {
        (i, key): torch.as_tensor(value).float() for i in state for key, value in state[i].items() if value is not None
    }


def client_body(rank, world, name):
    model = make_model()
    given = BASES[name](groups_of(model))
    params = [list(group["params"]) for group in given.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
        engine, optimizer, _, scheduler = deepspeed_c.initialize(
            model=model, optimizer=given, lr_scheduler=schedule, config=CONFIG
        )
        assert optimizer is given and scheduler is schedule
        for group, before in zip(optimizer.param_groups, params):
            assert all(a is b for a, b in zip(group["params"], before)) and len(group["params"]) == len(before)
        for step in range(STEPS):
            engine.backward(loss_of(engine, step, rank))
            if step == 1:
                optimizer.step()  # the caller steps the optimizer, and so also steps the schedule
                schedule.step()
            else:
                engine.step()
    dumped = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]

    # The caller drops the gradients before the step.
    engine.backward(loss_of(engine, 9, rank))
    optimizer.zero_grad()
    engine.step()
    same = [torch.equal(a, b) for a, b in zip(weights, model.parameters())]
    momentum = name == "SGD"
    assert all(same) or momentum, same
    with pytest.raises(OptimizerError, match="groups cannot be added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

    # A state in torch's layout, saved by another run, loads.
    optimizer.load_state_dict(dumped)
    for (key, a), b in zip(flat(optimizer.state_dict()).items(), flat(dumped).values()):
        assert torch.equal(a, b), key
    engine.offload_states()
    with pytest.raises(StateError, match="offloaded"):
        optimizer.state_dict()
    engine.reload_states()
    assert len(flat(copy.deepcopy(optimizer).state_dict())) == len(flat(dumped))
    engine.close()
    assert "step" not in vars(optimizer), "a closed engine goes on to answer for the optimizer"
    return {**dumped, "state": flat(dumped)}, weights


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", list(BASES))
def test_the_callers_optimizer_is_returned_and_is_what_plain_torch_has(name, world):
    want, weights = plain(name, world)
    for rank, (got, got_weights) in enumerate(run_ranks(world, client_body, name)):
        for a, b in zip(got_weights, weights):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"rank {rank}: {a}\n{b}"
        assert [g["params"] for g in got["param_groups"]] == [g["params"] for g in want["param_groups"]]
        expected = flat(want)
        assert got["state"].keys() == expected.keys(), (got["state"].keys(), expected.keys())
        for key, b in expected.items():
            a = got["state"][key]
            assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6), f"rank {rank}, {key}: {a}\n{b}"


@on_ranks(2)
def test_unused_parameters_have_no_state(rank, world):
    """A parameter without a gradient stays as it is. The other parameters are updated."""
    model = make_model()
    model.extra = torch.nn.Parameter(torch.ones(4))
    engine, optimizer, *_ = deepspeed_c.initialize(model=model, optimizer=FusedAdam(model.parameters()), config=CONFIG)
    for step in range(2):
        training.update(engine, loss_of(engine, step, rank))
    assert model.extra.tolist() == [1.0] * 4 and not optimizer.state.get(model.extra), optimizer.state[model.extra]
    steps = {float(optimizer.state[p]["step"]) for p in model.parameters() if p is not model.extra}
    assert steps == {2.0}, steps
    engine.close()


# -- states moved by the optimizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_the_optimizer_moves_its_states(rank, world, stage):
    config = training.config(stage, "AdamW", bf16={"enabled": True})
    engine, optimizer, *_ = deepspeed_c.initialize(model=make_model(), config=config)

    def step():
        training.update(engine, engine(torch.ones(7, dtype=torch.bfloat16)).square().sum())

    def held():
        return [t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values() if t.dim()]

    step()
    before = held()
    optimizer.offload_states(include=["optim_states"])
    assert before and not any(held()), (before, held())
    with pytest.raises(StateError, match="offloaded"):
        step()
    optimizer.reload_states(non_blocking=True)
    assert held() == before
    step()
    if stage == 2:  # The optimizer object that callers hold also works with the engine's next layout.
        engine.set_trainable(["0.*"])
        step()
        optimizer.offload_states()
        assert not any(held())
        optimizer.reload_states()
    engine.close()
