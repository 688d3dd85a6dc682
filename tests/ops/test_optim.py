"""Compares every optimizer of the registry with its float64 formula, and tests the parts that all fused optimizers
share.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle

import pytest
import torch

from deepspeed_c import ops
from deepspeed_c.errors import OptimizerError, StateError
from deepspeed_c.ops import reference
from deepspeed_c.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_c.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_c.ops.lamb import FusedLamb
from deepspeed_c.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.optim import BIAS_CORRECTION, MAXIMIZE, NESTEROV, Steps
from deepspeed_c.ops.reference import Hyper
from deepspeed_c.ops.sgd import FusedSGD
from tests.ops.data import DTYPES, SIZES, bits, normal, on_each_setup, optimizer_kinds, positive

KINDS = [name for name, _, _ in optimizer_kinds()]

HYPER = {
    "adam": Hyper(lr=0.01, weight_decay=0.1),
    "adamw": Hyper(lr=0.01, weight_decay=0.1),
    "lamb": Hyper(lr=0.01, weight_decay=0.1),
    "lion": Hyper(lr=0.01, beta2=0.99, weight_decay=0.1),
    "adagrad": Hyper(lr=0.01, eps=1e-10, weight_decay=0.1, lr_decay=0.1),
    "sgd": Hyper(lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1),
}

# All optimizers of this package, with options under which all of their arithmetic takes effect.
MAKERS = {
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1),
    "FusedAdam-L2": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False),
    "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, lr=0.01, weight_decay=0.1),
    "FusedLamb": lambda p: FusedLamb(p, lr=0.01, weight_decay=0.1),
    "FusedLion": lambda p: FusedLion(p, lr=0.01, weight_decay=0.1),
    "DeepSpeedCPULion": lambda p: DeepSpeedCPULion(p, lr=0.01, weight_decay=0.1),
    "DeepSpeedCPUAdagrad": lambda p: DeepSpeedCPUAdagrad(p, lr=0.01, weight_decay=0.1),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "FusedSGD-plain": lambda p: FusedSGD(p, lr=0.01, weight_decay=0.1),
    "Muon": lambda p: Muon(p, lr=0.01, weight_decay=0.1, adam_lr=0.003),
}

SHAPES = ((3, 5), (7,), (0,), (16, 9), (), (2, 3, 4))


def flags_of(h: Hyper) -> int:
    return BIAS_CORRECTION * h.bias_correction + NESTEROV * h.nesterov + MAXIMIZE * h.maximize


def hyper_args(h: Hyper) -> tuple:
    return (
        *(h.step, h.lr, h.beta1, h.beta2, h.eps, h.weight_decay, h.momentum, h.dampening, h.lr_decay),
        *(h.min_coeff, h.max_coeff, h.grad_scale, flags_of(h)),
    )


def call_step(kind, params, grads, states, copies, h):
    state0, state1 = [*states, [], []][:2]
    torch.ops.deepspeed_c.optim_step_(kind, params, grads, state0, state1, copies, *hyper_args(h))


def make_operands(kind, sizes, param_dtype, grad_dtype, state_dtype, copy_dtype=None, offset=0):
    n_states = reference.STEPS[kind][1]
    params = [normal(n, 100 + i, param_dtype, offset=offset) for i, n in enumerate(sizes)]
    grads = [normal(n, 200 + i, grad_dtype, offset=offset) for i, n in enumerate(sizes)]
    fill = positive if kind == "adagrad" else normal
    states = [[fill(n, 300 + i, state_dtype, 0.1, offset) for i, n in enumerate(sizes)]]
    if n_states == 2:
        states.append([positive(n, 400 + i, state_dtype, 0.1, offset) for i, n in enumerate(sizes)])
    copies = [] if copy_dtype is None else [torch.full((n + offset,), 7.0).to(copy_dtype)[offset:] for n in sizes]
    return params, grads, states, copies


def assert_close(got, want, what, scale=1.0):
    """Asserts that ``got`` equals ``want`` (float64) up to computing in float32 and one rounding to the dtype of
    ``got``.
    """
    # float32 allows a few roundings of intermediate values as large as the operands. 16-bit dtypes allow one unit in
    # the last place.
    rtol = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[got.dtype]
    atol = 1e-6 * scale if got.dtype == torch.float32 else 1e-6 * scale + (6e-8 if got.dtype == torch.float16 else 0)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def expected(kind, params, grads, states, h):
    out = []
    for i in range(len(params)):
        doubles = [s[i].double() for s in states]
        out.append(reference.step(kind, params[i].double(), grads[i].double(), doubles, h))
    return out


def compare(kind, params, states, copies, want, what):
    for i, (param, updated) in enumerate(zip(params, want)):
        where = f"{what}, tensor {i} of {param.numel()} elements"
        assert_close(param, updated.param, f"{where}, param")
        for slot, (state, wanted) in enumerate(zip(states, updated.states)):
            assert_close(state[i], wanted, f"{where}, state {slot}")
        if copies:
            assert torch.equal(bits(copies[i]), bits(param.to(copies[i].dtype))), (
                f"{where}: copy is not the rounded param"
            )


def clear_of_sign_changes(kind, grads, states, h):
    """Lion's update is a sign, which jumps at 0. Moves gradients for which its argument is 0 up to rounding."""
    if kind == "lion":
        for g, m in zip(grads, states[0]):
            near = (h.beta1 * m.double() + (1 - h.beta1) * h.gradient(g.double())).abs() < 1e-3
            g[near] += 1.0


def test_registry_is_what_the_formulas_cover():
    assert {name: n for name, n, _ in optimizer_kinds()} == {name: n for name, (_, n) in reference.STEPS.items()}
    assert [name for name, _, needs_norms in optimizer_kinds() if needs_norms] == ["lamb"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_step_is_the_formula_at_every_tail(kind, offset):
    params, grads, states, copies = make_operands(kind, SIZES, *[torch.float32] * 3, torch.bfloat16, offset)
    for step in (1, 2, 3):
        h = dataclasses.replace(HYPER[kind], step=step, grad_scale=0.5)
        clear_of_sign_changes(kind, grads, states, h)
        want = expected(kind, params, grads, states, h)
        call_step(kind, params, grads, states, copies, h)
        compare(kind, params, states, copies, want, f"{kind} step {step}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_step_in_every_dtype(kind, param_dtype, grad_dtype, state_dtype):
    params, grads, states, copies = make_operands(
        kind, (1, 31, 1009), param_dtype, grad_dtype, state_dtype, torch.float16
    )
    h = dataclasses.replace(HYPER[kind], step=3)
    clear_of_sign_changes(kind, grads, states, h)
    want = expected(kind, params, grads, states, h)
    call_step(kind, params, grads, states, copies, h)
    for i, (param, updated) in enumerate(zip(params, want)):
        # LAMB's update is computed from the stored moments, so the rounding of a 16-bit moment changes the update.
        loose = kind == "lamb" and state_dtype != torch.float32
        if loose:
            torch.testing.assert_close(param.double(), updated.param, rtol=0.02, atol=2e-3)
        else:
            assert_close(param, updated.param, f"{kind}, tensor {i}")
        for slot, (state, wanted) in enumerate(zip(states, updated.states)):
            assert_close(state[i], wanted, f"{kind}, tensor {i}, state {slot}")
        assert torch.equal(bits(copies[i]), bits(param.to(torch.float16)))


@pytest.mark.parametrize(
    "kind, change",
    [(kind, {"maximize": True}) for kind in KINDS]
    + [(kind, {"bias_correction": False}) for kind in ("adam", "adamw", "lamb")]
    + [("sgd", {"nesterov": True, "dampening": 0.0}), ("sgd", {"momentum": 0.0, "dampening": 0.0})]
    + [(kind, {"lr": 0.0}) for kind in KINDS],
    ids=str,
)
def test_flags_and_limits(kind, change):
    params, grads, states, copies = make_operands(kind, (17, 1009), *[torch.float32] * 3)
    h = dataclasses.replace(HYPER[kind], step=2, **change)
    clear_of_sign_changes(kind, grads, states, h)
    want = expected(kind, params, grads, states, h)
    call_step(kind, params, grads, states, copies, h)
    compare(kind, params, states, copies, want, f"{kind} {change}")


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_for_any_thread_count_and_instruction_set(kind):
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)

    def run():
        params, grads, states, copies = make_operands(kind, (1009, 300_007, 5), *dtypes)
        call_step(kind, params, grads, states, copies, dataclasses.replace(HYPER[kind], step=2))
        return torch.cat([bits(t) for t in (*params, *itertools.chain(*states), *copies)])

    results = on_each_setup(run, (1, 2, 3, 7))
    assert len(results) >= 4
    first_key, first = next(iter(results.items()))
    for key, got in results.items():
        n_different = int((got != first).sum())
        assert n_different == 0, f"{kind}: {n_different} bytes differ between (isa, threads) {first_key} and {key}"


@pytest.mark.parametrize("kind", KINDS)
def test_special_values_reach_only_their_own_element(kind):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45, 1e15, -0.0, 0.0])
    if kind == "lamb":
        special = torch.tensor([1e-45, 1e10, -0.0, 0.0, 1.0, -1e10, 1e-38])  # its norms join the elements of a tensor
    n = 40
    grad = normal(n, 5)
    grad[3 : 3 + len(special)] = special
    params, _, states, _ = make_operands(kind, (n,), *[torch.float32] * 3)
    h = dataclasses.replace(HYPER[kind], step=2)
    want = expected(kind, params, [grad], states, h)[0]
    call_step(kind, params, [grad], states, [], h)
    with_big = want.param.abs() > 1e30
    finite = torch.isfinite(want.param) & torch.isfinite(params[0].double()) & ~with_big
    assert finite.sum() >= n - len(special)
    torch.testing.assert_close(params[0].double()[finite], want.param[finite], rtol=1e-5, atol=1e-6)
    if kind != "lamb":
        assert torch.isnan(params[0][3]), f"a NaN gradient gave {params[0][3]}"
        assert int((~torch.isfinite(params[0])).sum()) <= 5


def test_steps_are_shared_views_and_diverge_when_the_entries_do():
    states = [{"step": torch.tensor(3.0)}, {"step": 5}, {"step": torch.tensor(3.0)}]
    steps = Steps(states)
    assert steps.advance() == [4, 6, 4]
    assert [float(s["step"]) for s in states] == [4.0, 6.0, 4.0]
    assert steps.fits([s["step"] for s in states])
    states[1]["step"].fill_(4.0)
    assert steps.advance() == [5]
    steps.retreat()
    assert [float(s["step"]) for s in states] == [4.0, 4.0, 4.0]
    states[0]["step"] = torch.tensor(1.0)
    assert not steps.fits([s["step"] for s in states])
    assert all(s["step"].shape == () and s["step"].dtype == torch.float32 for s in states)


def model_params(dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def set_grads(params, seed, skip=()):
    torch.manual_seed(seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape).to(p.dtype)
        p.grad = None if i in skip else grad


def run_steps(optimizer, params, seeds, skip=()):
    for seed in seeds:
        set_grads(params, seed, skip)
        optimizer.step()


def all_bits(optimizer, params):
    chunks = [bits(p) for p in params]
    for p in params:
        for key in sorted(optimizer.state.get(p, {})):
            chunks.append(bits(torch.as_tensor(optimizer.state[p][key])))
    return torch.cat(chunks)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_pickles_go_on_alike(name, dtype):
    params = model_params(dtype)
    optimizer = MAKERS[name](params)
    run_steps(optimizer, params, (1, 2))

    together = copy.deepcopy((params, optimizer))
    pickled = pickle.loads(pickle.dumps((params, optimizer)))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = MAKERS[name](loaded_params)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))

    run_steps(optimizer, params, (3, 4))
    want = all_bits(optimizer, params)
    for how, (others, twin) in {"deepcopy": together, "pickle": pickled, "load": (loaded_params, loaded)}.items():
        run_steps(twin, others, (3, 4))
        assert torch.equal(all_bits(twin, others), want), f"{name} went another way after {how}"


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_without_gradient_stay_as_they_are(name):
    params = model_params()
    optimizer = MAKERS[name](params)
    before = [p.detach().clone() for p in params]
    run_steps(optimizer, params, (1, 2), skip=(0, 3))
    assert torch.equal(params[0], before[0]) and torch.equal(params[3], before[3])
    assert params[0] not in optimizer.state
    assert not torch.equal(params[1], before[1])
    # Each parameter's bias correction starts with its first step, as in torch.
    run_steps(optimizer, params, (3,))
    assert float(optimizer.state[params[0]]["step"]) == 1.0
    assert float(optimizer.state[params[1]]["step"]) == 3.0


@pytest.mark.parametrize("name", MAKERS)
def test_one_step_equals_the_step_in_pieces(name):
    whole, pieces = model_params(), model_params()
    a, b = MAKERS[name](whole), MAKERS[name](pieces)
    for seed in (1, 2, 3):
        set_grads(whole, seed)
        a.step()
        torch.manual_seed(seed)
        grads = {id(p): torch.randn(p.shape) * 8.0 for p in pieces}
        b.begin_step()
        for index, group in enumerate(b.param_groups):
            for members in (group["params"][::2], group["params"][1::2]):
                b.step_tensors(index, members, [grads[id(p)] for p in members], [], 0.125)
    assert torch.equal(all_bits(a, whole), all_bits(b, pieces))


@pytest.mark.parametrize("name", MAKERS)
def test_fused_step_takes_gradients_from_outside_and_writes_copies(name):
    whole, outside = model_params(), model_params()
    a, b = MAKERS[name](whole), MAKERS[name](outside)
    set_grads(whole, 1, skip=(1,))
    a.step()
    by_id = {id(q): p.grad for p, q in zip(whole, outside)}
    grads = [[None if by_id[id(p)] is None else by_id[id(p)] * 4.0 for p in g["params"]] for g in b.param_groups]
    copies = [[torch.zeros(p.shape, dtype=torch.bfloat16) for p in g["params"]] for g in b.param_groups]
    b.fused_step(grads, copies, 0.25)
    assert torch.equal(all_bits(a, whole), all_bits(b, outside))
    for group, targets, given in zip(b.param_groups, copies, grads):
        for p, target, grad in zip(group["params"], targets, given):
            want = torch.zeros_like(target) if grad is None else p.detach().bfloat16()
            assert torch.equal(target, want)
    b.fused_step(grads, [[None] * len(c) for c in copies], 1.0)
    with pytest.raises(OptimizerError, match="lists of gradients"):
        b.fused_step([[]] * (len(b.param_groups) + 1))
    with pytest.raises(OptimizerError, match="gradients for"):
        b.fused_step([[]] * len(b.param_groups))


def test_a_piece_is_updated_once_a_step():
    params = model_params()
    optimizer = FusedAdam(params)
    grads = [torch.ones_like(p) for p in params]
    with pytest.raises(StateError, match="not open"):
        optimizer.step_tensors(0, params, grads)
    optimizer.begin_step()
    optimizer.step_tensors(0, params[:2], grads[:2])
    before = all_bits(optimizer, params)
    with pytest.raises(StateError, match="parameter 0 .*not open"):
        optimizer.step_tensors(0, params[1:3], grads[1:3])
    assert torch.equal(all_bits(optimizer, params), before)
    optimizer.begin_step(params[:1])
    assert [float(optimizer.state[p]["step"]) for p in params[:2]] == [2.0, 1.0]


@pytest.mark.parametrize("name", MAKERS)
def test_mixed_dtypes_and_uneven_steps_in_one_group(name):
    shapes = ((4, 5), (6, 3), (7,), (8,))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
    mixed = [torch.nn.Parameter(p.detach().to(d)) for p, d in zip(model_params(shapes=shapes), dtypes)]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in mixed]
    together = MAKERS[name](mixed)
    single = [MAKERS[name]([p]) for p in alone]
    for seed, skip in ((1, ()), (2, (0, 2)), (3, ()), (4, (3,))):
        set_grads(mixed, seed, skip)
        for p, q, optimizer in zip(mixed, alone, single):
            q.grad = None if p.grad is None else p.grad.clone()
            optimizer.step()
        together.step()
    for i, (p, q) in enumerate(zip(mixed, alone)):
        assert torch.equal(bits(p), bits(q)), f"{name}: parameter {i} of {p.dtype} differs in company"


def test_channels_last_weights_and_odd_gradient_layouts():
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 5, 5)
    plain = torch.nn.Parameter(weight.clone())
    last = torch.nn.Parameter(weight.clone().to(memory_format=torch.channels_last))
    assert not last.is_contiguous()
    a, b = FusedAdam([plain], lr=0.1), FusedAdam([last], lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        grad = torch.randn(4, 3, 5, 5)
        plain.grad = grad.to(memory_format=torch.channels_last) if seed == 1 else grad.clone()
        last.grad = grad.clone() if seed == 2 else grad.to(memory_format=torch.channels_last)
        a.step()
        b.step()
    assert torch.equal(plain, last)
    assert b.state[last]["exp_avg"].stride() == last.stride()


def test_transposed_parameter_is_updated_in_place():
    base = torch.randn(6, 4)
    param = torch.nn.Parameter(base.t())
    want = torch.nn.Parameter(base.t().contiguous())
    param.grad = torch.randn(4, 6)
    want.grad = param.grad.clone()
    FusedSGD([param], lr=0.5).step()
    torch.optim.SGD([want], lr=0.5).step()
    assert torch.equal(param, want)


@pytest.mark.parametrize("name", MAKERS)
def test_refusals_change_nothing(name):
    def refused(params, match, spoil=None):
        optimizer = MAKERS[name](params)
        run_steps(optimizer, params, (1,))
        set_grads(params, 2)
        if spoil is not None:
            spoil(optimizer, params)
        before = all_bits(optimizer, params)
        with pytest.raises(OptimizerError, match=match):
            optimizer.step()
        assert torch.equal(all_bits(optimizer, params), before), "state changed although the step was refused"

    def sparse(optimizer, params):
        params[0].grad = params[0].grad.to_sparse()

    def bad_lr(optimizer, params):
        for group in optimizer.param_groups:
            group["lr"] = -1.0

    refused(model_params(), "sparse", sparse)
    if name != "Muon":
        refused(model_params(), "lr", bad_lr)
    params = [torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64))]
    optimizer = MAKERS[name](params)
    set_grads(params, 1)
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="float64"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_overlapping_memory_is_refused():
    param = torch.nn.Parameter(torch.ones(1, 3).expand(4, 3))
    param.grad = torch.ones(4, 3)
    with pytest.raises(OptimizerError, match="gaps or overlaps"):
        FusedSGD([param], lr=0.1).step()


@pytest.mark.parametrize("name", MAKERS)
def test_closure_and_scheduler(name):
    params = model_params()
    optimizer = MAKERS[name](params)
    base = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(float(optimizer.step(closure).detach()))
        scheduler.step()
    assert losses[2] < losses[1] < losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr / 8 for lr in base])


def test_learning_rate_may_be_a_tensor():
    a, b = model_params(), model_params()
    first, second = FusedAdam(a, lr=torch.tensor(0.01)), FusedAdam(b, lr=float(torch.tensor(0.01)))
    run_steps(first, a, (1, 2))
    run_steps(second, b, (1, 2))
    assert torch.equal(all_bits(first, a), all_bits(second, b))


def test_autograd_sees_that_weights_changed():
    param = torch.nn.Parameter(torch.randn(4))
    loss = (param * param).sum()
    param.grad = torch.ones(4)
    FusedSGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"])
@pytest.mark.parametrize("is_fp32", [True, False])
def test_state_dtype(name, is_fp32):
    cls = {
        "DeepSpeedCPUAdam": DeepSpeedCPUAdam,
        "DeepSpeedCPULion": DeepSpeedCPULion,
        "DeepSpeedCPUAdagrad": DeepSpeedCPUAdagrad,
    }[name]
    params = model_params(torch.bfloat16)
    optimizer = cls(params, fp32_optimizer_states=is_fp32)
    run_steps(optimizer, params, (1,))
    want = torch.float32 if is_fp32 else torch.bfloat16
    names = [key for key in optimizer.state[params[0]] if key != "step"]
    assert names and all(optimizer.state[params[0]][key].dtype == want for key in names)
    twin = cls(model_params(torch.bfloat16), fp32_optimizer_states=is_fp32)
    twin.load_state_dict(optimizer.state_dict())
    other = twin.param_groups[0]["params"][0]
    for key in names:
        assert twin.state[other][key].dtype == want
        assert torch.equal(twin.state[other][key], optimizer.state[params[0]][key])


def test_ops_exports_its_modules():
    for name in vars(ops)["__all__"]:  # our names only; ops.__all__ adds DeepSpeed's
        assert getattr(ops, name).__name__ == f"deepspeed_c.ops.{name}"
