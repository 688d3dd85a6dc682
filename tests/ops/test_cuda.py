"""Compares the operators on a CUDA device with the same operators on the CPU, and with torch's operators on the device.

Elementwise operators give the CPU's bits (csrc/cuda/common.cuh, Note: Same bits as the host). Sums agree to 1e-12.
Tests without torch are in tests/csrc/cuda: they also run on an emulated device, so that a machine without a GPU tests
the kernels too.

Memory errors and races, on a machine with the CUDA toolkit (minutes):

    compute-sanitizer --tool memcheck --error-exitcode 1 csrc/build/tests/csrc/cuda/test_twins
    compute-sanitizer --tool racecheck --error-exitcode 1 csrc/build/tests/csrc/cuda/test_twins
    compute-sanitizer --tool initcheck --error-exitcode 1 python -m pytest -q tests/ops/test_cuda.py
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from deepspeed_c.ops import cross_entropy, flat, moe, nn, quant
from deepspeed_c.ops.optim import NESTEROV
from tests.ops.data import DTYPES, SIZES, bits, normal
from tests.ops.test_optim import HYPER, KINDS, MAKERS, SHAPES, call_step, hyper_args, make_operands

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

OPS = torch.ops.deepspeed_c
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3.4e38, 65504.0, 65520.0, 6e-8]


def on_device(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy on the device that begins ``offset`` elements into its allocation."""
    moved = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=DEVICE)[offset:]
    return moved.copy_(tensor.view(-1)).view(tensor.shape)


def lists_on_device(lists, offset=0):
    return [[on_device(t, offset) for t in tensors] for tensors in lists]


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Asserts equal bits, or NaN on both sides: the processor chooses which NaN an operation gives."""
    got = got.cpu()
    different = (bits(got) != bits(want)).view(-1, got.element_size()).any(1) & ~(got.isnan() & want.isnan()).view(-1)
    at = different.nonzero().view(-1)
    first = at[:4].tolist()
    assert len(at) == 0, (
        f"{what}: {len(at)} of {got.numel()} differ, at {first}: "
        f"{got.view(-1)[first]}, on the CPU {want.view(-1)[first]}"
    )


def run_both(kind, h, sizes, dtypes, offset=0, steps=2, specials=False, offset_on_device=None):
    """Runs ``steps`` steps on both devices and compares.

    LAMB's ratio may differ in its last place, so LAMB's weights get a tolerance.
    """
    param_dtype, grad_dtype, state_dtype, copy_dtype = dtypes
    params, grads, states, copies = make_operands(kind, sizes, param_dtype, grad_dtype, state_dtype, copy_dtype, offset)
    if specials:
        for grad in grads:
            hostile = torch.tensor(SPECIAL).to(grad.dtype)[: grad.numel()]
            grad[: len(hostile)] = hostile
    shift = offset if offset_on_device is None else offset_on_device
    d_params, d_grads, d_copies = lists_on_device([params, grads, copies], shift)
    d_states = lists_on_device(states, shift)
    for step in range(h.step, h.step + steps):
        now = dataclasses.replace(h, step=step)
        call_step(kind, params, grads, states, copies, now)
        call_step(kind, d_params, d_grads, d_states, d_copies, now)
    what = f"{kind} {dtypes} offset {offset}"
    for i in range(len(sizes)):
        for slot in range(len(states)):
            assert_same(d_states[slot][i], states[slot][i], f"{what}, tensor {i}, state {slot}")
        for name, got, want in [("param", d_params, params), *([("copy", d_copies, copies)] if copies else [])]:
            if kind == "lamb":
                torch.testing.assert_close(
                    got[i].cpu().float(),
                    want[i].float(),
                    rtol=2**-7 if want[i].element_size() == 2 else 1e-6,
                    atol=1e-7,
                )
            else:
                assert_same(got[i], want[i], f"{what}, tensor {i}, {name}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 1])
def test_step_at_every_tail(kind, offset):
    run_both(kind, HYPER[kind], SIZES, (torch.float32,) * 4, offset)
    run_both(kind, HYPER[kind], SIZES, (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16), offset)


@pytest.mark.parametrize("kind", KINDS)
def test_step_in_every_dtype(kind):
    for dtypes in itertools.product(DTYPES, DTYPES, DTYPES, (None, *DTYPES)):
        run_both(kind, HYPER[kind], (0, 1, 1009, 7), dtypes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [{"maximize": True}, {"bias_correction": False}, {"grad_scale": 1 / 3}, {"step": 1000}, {"weight_decay": 0.0}],
)
def test_step_with_every_flag(kind, change):
    run_both(kind, dataclasses.replace(HYPER[kind], **change), (4097,), (torch.float32,) * 4)


def test_sgd_variants():
    for change in ({"momentum": 0.0, "dampening": 0.0}, {"dampening": 0.0, "nesterov": True}):
        run_both("sgd", dataclasses.replace(HYPER["sgd"], **change), (4097,), (torch.float32,) * 4)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "lamb"])
def test_special_values(kind):
    run_both(
        kind, HYPER[kind], (4097, 1, 100), (torch.float32, torch.float32, torch.float32, torch.float16), specials=True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_more_tensors_than_a_launch_holds(kind):
    run_both(
        kind,
        HYPER[kind],
        [i * 13 % 257 for i in range(3000)],
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
        steps=1,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor_larger_than_a_launch_of_norms(kind):
    run_both(kind, HYPER[kind], [30_000_003], (torch.float32,) * 4, steps=1)


def test_more_elements_than_int32_counts():
    """Sizes over INT_MAX, with Lion in bf16 and 3 x 4.3 GB.

    The first and the last elements are compared with the CPU.
    """
    n = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 3 * 2 * n + 2**30:
        pytest.skip("needs 14 GB of device memory")
    tensors = [torch.empty(n, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(3)]
    ends = [slice(0, 5000), slice(n - 5000, n)]
    before = [[t[end].cpu() for t in tensors] for end in ends]
    call_step("lion", [tensors[0]], [tensors[1]], [[tensors[2]]], [], HYPER["lion"])
    for end, (param, grad, state) in zip(ends, before):
        call_step("lion", [param], [grad], [[state]], [], HYPER["lion"])
        assert_same(tensors[0][end], param, f"param {end}")
        assert_same(tensors[2][end], state, f"state {end}")
    tensors[1].zero_()
    tensors[1][-3:] = 2.0
    assert flat.norm([tensors[1]]).sumsq.tolist() == [12.0, 0.0]


# -- LAMB's halves and Muon's ---------------------------------------------------------------------------------------


def test_norms_and_apply():
    h = HYPER["lamb"]
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
    params, grads, states, copies = make_operands("lamb", SIZES, *dtypes)
    d_params, d_grads, d_copies = lists_on_device([params, grads, copies])
    d_states = lists_on_device(states)
    want = OPS.optim_norms_("lamb", params, grads, *states, [], *hyper_args(h))
    got = OPS.optim_norms_("lamb", d_params, d_grads, *d_states, [], *hyper_args(h))
    assert got.device.type == torch.device(DEVICE).type
    torch.testing.assert_close(got.cpu(), want, rtol=1e-12, atol=0)
    ratios = torch.linspace(0.1, 2.0, len(SIZES), dtype=torch.float64)
    OPS.optim_apply_("lamb", params, [], *states, copies, *hyper_args(h), ratios)
    OPS.optim_apply_("lamb", d_params, [], *d_states, d_copies, *hyper_args(h), ratios.to(DEVICE))
    for i in range(len(SIZES)):
        assert_same(d_params[i], params[i], f"param {i}")
        assert_same(d_copies[i], copies[i], f"copy {i}")


@pytest.mark.parametrize("flags", [0, NESTEROV])
def test_muon(flags):
    for grad_dtype, state_dtype, dtype in itertools.product(DTYPES, DTYPES, DTYPES):
        grads = [normal(n, n, grad_dtype) for n in SIZES]
        momenta = [normal(n, n + 1, state_dtype) for n in SIZES]
        updates = [torch.zeros(n, dtype=dtype) for n in SIZES]
        params = [normal(n, n + 2, dtype) for n in SIZES]
        d_grads, d_momenta, d_updates, d_params = lists_on_device([grads, momenta, updates, params])
        OPS.muon_momentum_(grads, momenta, updates, 0.95, 0.5, flags)
        OPS.muon_momentum_(d_grads, d_momenta, d_updates, 0.95, 0.5, flags)
        OPS.muon_apply_(params, updates, [], 0.02, 0.1)
        OPS.muon_apply_(d_params, d_updates, [], 0.02, 0.1)
        for what, got, want in [
            ("momentum", d_momenta, momenta),
            ("update", d_updates, updates),
            ("param", d_params, params),
        ]:
            for i in range(len(SIZES)):
                assert_same(got[i], want[i], f"{what} {i}, {grad_dtype} {state_dtype} {dtype}")


# -- flat passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1])
def test_norm(offset):
    tensors = [normal(n, n, dtype, offset=offset) for n in SIZES for dtype in DTYPES] * 4
    moved = [on_device(t, offset) for t in tensors]
    torch.testing.assert_close(flat.norm(moved).sumsq.cpu(), flat.norm(tensors).sumsq, rtol=1e-12, atol=0)
    moved[5][0] = float("nan")
    moved[-1][-1] = float("inf")
    assert flat.norm(moved).n_nonfinite == 2
    assert flat.norm(moved).value == float("inf")


def test_norm_has_the_same_bits_in_every_run():
    tensors = [torch.randn(n, device=DEVICE) for n in (1, 100_003, 20_000_003)]
    first = bits(flat.norm(tensors).sumsq)
    for _ in range(20):
        assert torch.equal(bits(flat.norm(tensors).sumsq), first)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("n_sources", [1, 2, 3, 8])
def test_reduce(source, target, n_sources):
    for n, accumulate in itertools.product(SIZES, (False, True)):
        sources = [normal(n, i, source) for i in range(n_sources)]
        into = normal(n, 99, target)
        d_sources, (d_into,) = lists_on_device([sources, [into]])
        want = flat.reduce_(sources, into, scale=1 / n_sources, accumulate=accumulate).sumsq
        got = flat.reduce_(d_sources, d_into, scale=1 / n_sources, accumulate=accumulate).sumsq
        assert_same(d_into, into, f"{n} elements")
        torch.testing.assert_close(got.cpu(), want, rtol=1e-12, atol=0)


def test_reduce_in_place_of_a_source():
    sources = [normal(4097, i) for i in range(3)]
    (moved,) = lists_on_device([sources])
    flat.reduce_(sources, sources[1])
    flat.reduce_(moved, moved[1])
    assert_same(moved[1], sources[1], "acc")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype):
    tensors = [normal(n, n + i, dtype) for i in range(10) for n in SIZES]
    (moved,) = lists_on_device([tensors])
    flat.scale_(tensors, 1 / 3)
    flat.scale_(moved, 1 / 3)
    for i, (got, want) in enumerate(zip(moved, tensors)):
        assert_same(got, want, f"tensor {i}")


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_cast_of_every_half(source, target):
    """Casts all 65,536 halves, or as many f32 values with random bits.

    The bytes equal the CPU's, payloads of NaNs included, and the values equal torch's.
    """
    generator = torch.Generator().manual_seed(1)
    if source == torch.float32:
        tensor = torch.randint(-(2**31), 2**31, (65_536,), generator=generator).to(torch.int32).view(torch.float32)
    else:
        tensor = torch.arange(65_536).to(torch.int16).view(source)
    moved = on_device(tensor)
    want, got = torch.empty(65_536, dtype=target), torch.empty(65_536, dtype=target, device=DEVICE)
    flat.cast(tensor, want)
    flat.cast(moved, got)
    assert torch.equal(bits(got.cpu()), bits(want))
    assert torch.equal(got.nan_to_num(7.0), moved.to(target).nan_to_num(7.0))


# -- streams, graphs, devices ---------------------------------------------------------------------------------------


def test_calls_are_enqueued_on_the_current_stream():
    """Operators called on a stream see the results of a slow producer on that stream.

    They block neither other streams nor the host.
    """
    stream = torch.cuda.Stream()
    grads = torch.zeros(1_000_003, device=DEVICE)
    param = torch.zeros_like(grads)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        grads.fill_(2.0)
        norm = flat.norm([grads])
        call_step(
            "sgd",
            [param],
            [grads],
            [],
            [],
            dataclasses.replace(HYPER["sgd"], lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0),
        )
    assert not stream.query(), "the host waited for the device"
    stream.synchronize()
    assert norm.sumsq.tolist() == [4.0 * 1_000_003, 0.0]
    assert torch.equal(param, torch.full_like(param, -2.0))


def test_streams_do_not_share_scratch():
    """Norms and LAMB steps on four streams at once give the same results as on one stream."""
    inputs = [torch.randn(5_000_003, device=DEVICE) for _ in range(4)]
    alone = [flat.norm([x]).sumsq for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        norms = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                norms.append(flat.norm([x]).sumsq)
        torch.cuda.synchronize()
        for got, want in zip(norms, alone):
            assert torch.equal(bits(got), bits(want))


def test_a_step_can_be_captured_in_a_graph():
    params, grads, states, _ = make_operands("lamb", SIZES, torch.float32, torch.float32, torch.float32)
    d_params, d_grads = lists_on_device([params, grads])
    d_states = lists_on_device(states)
    call_step(
        "lamb", *([on_device(t) for t in ts] for ts in (params, grads)), lists_on_device(states), [], HYPER["lamb"]
    )  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sumsq = flat.norm(d_grads).sumsq
        call_step("lamb", d_params, d_grads, d_states, [], HYPER["lamb"])
    for _ in range(3):
        graph.replay()
        call_step("lamb", params, grads, states, [], HYPER["lamb"])
    torch.cuda.synchronize()
    torch.testing.assert_close(sumsq.cpu(), flat.norm(grads).sumsq, rtol=1e-12, atol=0)
    for i in range(len(SIZES)):
        assert_same(d_states[0][i], states[0][i], f"state {i}")
        torch.testing.assert_close(d_params[i].cpu(), params[i], rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_of_another_device_than_the_current_one():
    param, grad = torch.ones(100, device="cuda:1"), torch.ones(100, device="cuda:1")
    with torch.cuda.device(0):
        call_step(
            "sgd",
            [param],
            [grad],
            [],
            [],
            dataclasses.replace(HYPER["sgd"], lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0),
        )
        assert flat.norm([grad]).value == 10.0
    assert torch.equal(param.cpu(), torch.zeros(100))
    with pytest.raises(ValueError, match="cuda"):
        call_step("sgd", [param], [grad.to("cuda:0")], [], [], dataclasses.replace(HYPER["sgd"], momentum=0.0))


def test_host_and_device_tensors_do_not_mix():
    param, grad = torch.ones(4, device=DEVICE), torch.ones(4)
    with pytest.raises(ValueError, match="(?i)cpu|cuda"):
        call_step("sgd", [param], [grad], [], [], dataclasses.replace(HYPER["sgd"], momentum=0.0, dampening=0.0))
    assert param.tolist() == [1.0] * 4


# -- the optimizers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_as_on_the_cpu(name, dtype):
    params = [
        torch.nn.Parameter(normal(torch.Size(shape).numel(), i, dtype).view(shape)) for i, shape in enumerate(SHAPES)
    ]
    if name == "Muon":
        params = [p for p in params if p.dim() == 2]
    moved = [torch.nn.Parameter(on_device(p.detach())) for p in params]
    ours, theirs = MAKERS[name](params), MAKERS[name](moved)
    for step in range(3):
        for i, (p, q) in enumerate(zip(params, moved)):
            p.grad = normal(p.numel(), 10 * step + i, dtype).view(p.shape)
            q.grad = on_device(p.grad)
        ours.step()
        theirs.step()
    # On a device, Muon's matrix products and LAMB's sums add in another order.
    rtol, atol = (
        (0.0, 0.0) if name not in ("Muon", "FusedLamb") else (2e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    )
    for p, q in zip(params, moved):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=rtol, atol=atol if name != "Muon" else 1e-3)


def test_adamw_is_torchs():
    from deepspeed_c.ops.adam import FusedAdam

    params = [torch.nn.Parameter(torch.randn(n, device=DEVICE)) for n in (1, 1009, 100_003)]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = FusedAdam(params, lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(twins, lr=0.01, weight_decay=0.1, fused=True)
    for _ in range(5):
        for p, q in zip(params, twins):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(params, twins):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operators_on_rows(dtype):
    """Operators of transformer layers and their gradients give the host's results, apart from the order of sums."""

    def run(device):
        torch.manual_seed(0)
        x, up, weight, bias = (
            torch.randn(shape).to(dtype).to(device).requires_grad_() for shape in ((37, 200), (37, 200), (200,), (200,))
        )
        angles = torch.randn(1, 37, 25).to(device)
        results = [
            nn.layer_norm(x, weight, bias, residual=up)[0],
            nn.rms_norm(x, weight),
            nn.bias_gelu(x, bias),
            nn.swiglu(x, up),
            OPS.nn_dropout(x, bias, up, 0.3, 77),
            nn.rotary(x.view(1, 37, 4, 50), angles.cos(), angles.sin()).view(37, 200),
            nn.masked_softmax(x.view(1, 1, 37, 200), scale=0.3, is_causal=True).view(37, 200),
        ]
        torch.autograd.backward(results, [up.detach()] * len(results))
        return [y.detach().cpu() for y in (*results, x.grad, up.grad, weight.grad, bias.grad)]

    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    for i, (got, want) in enumerate(zip(run(DEVICE), run("cpu"))):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()), msg=f"result {i}"
        )


def test_cross_entropy_over_cut_words():
    logits, targets = torch.randn(37, 300), torch.arange(37) - 1
    rows = [cross_entropy.rows(logits.to(device), targets.to(device)).cpu() for device in (DEVICE, "cpu")]
    torch.testing.assert_close(*rows)
    found = [logits.clone().to(device) for device in (DEVICE, "cpu")]
    for of_device in found:
        log_sum, scale = (x.to(of_device.device) for x in (logits.logsumexp(1), torch.full((37,), 0.5)))
        cross_entropy.grad_(of_device, targets.to(of_device.device), log_sum, scale, 0.1, 300)
    assert_same(*found, "gradient")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n_tokens, n_experts, k, width",
    [(0, 3, 2, 5), (1, 1, 1, 1), (5, 3, 0, 3), (37, 5, 2, 17), (1009, 64, 6, 512), (127, 13, 3, 4099)],
)
def test_rows_of_experts(n_tokens, n_experts, k, width, dtype):
    """Rows of mixtures of experts and their gradients have the host's bits; gradients of weights have another order of
    their sums in float64."""
    torch.manual_seed(0)
    indices = torch.rand(n_tokens, n_experts).argsort(-1)[:, :k].int()
    indices = indices.where((torch.rand(n_tokens, k) > 0.2) & (indices != 2), -1)  # expert 2 has no token
    x, dout = torch.randn(2, n_tokens, width).to(dtype)
    weights = torch.rand(n_tokens, k)

    def run(device):
        own_x, own_weights = (t.detach().clone().to(device).requires_grad_() for t in (x, weights))
        order, inverse, _ = moe.sort_slots(indices.to(device), n_experts)
        rows = moe.gather_rows(own_x, order, k, inverse)
        turned = moe.permute_rows(rows, torch.arange(len(order) - 1, -1, -1, device=device))
        flipped = inverse.where(inverse < 0, len(order) - 1 - inverse)
        out = moe.combine_rows(turned, flipped, own_weights)
        out.backward(dout.to(device))
        return {"rows": rows, "turned": turned, "out": out, "x.grad": own_x.grad, "weights.grad": own_weights.grad}

    wanted = run("cpu")
    for name, got in run(DEVICE).items():
        if name == "weights.grad":
            torch.testing.assert_close(got.cpu(), wanted[name], rtol=2**-23, atol=1e-6)
        else:
            assert_same(got.detach(), wanted[name].detach(), name)


def test_rows_of_experts_are_computed_by_kernels_on_the_current_stream():
    """Neither a formula nor a copy to the host: a graph captures the calls, and a replay reads the new rows."""
    x, weights = torch.randn(31, 64, device=DEVICE), torch.rand(31, 2, device=DEVICE)
    indices = torch.rand(31, 8, device=DEVICE).argsort(-1)[:, :2].int()
    order, inverse, _ = moe.sort_slots(indices, 8)

    def layer():
        rows = OPS.moe_gather(x, order, 2, inverse)
        return OPS.moe_combine(rows, inverse, weights), *OPS.moe_combine_backward(x, rows, inverse, weights, True)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    x.copy_(torch.randn(31, 64))
    graph.replay()
    for got, want in zip(captured, layer()):
        assert_same(got, want.cpu(), "replayed")


def test_orders_of_experts_that_do_not_fit_are_nan():
    """A launch cannot wait for the contents of a tensor, and reads and writes nothing outside of the rows."""
    x, weights = torch.ones(3, 5, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    inverse = torch.tensor([[1], [0], [2]], device=DEVICE)
    rows = moe.gather_rows(x, torch.tensor([1, 0, 2**40], device=DEVICE), 1, inverse)
    assert rows.isnan().all(1).tolist() == [False, False, True]
    out = moe.combine_rows(x, torch.tensor([[0], [2**40], [-1]], device=DEVICE), weights)
    assert out.isnan().all(1).tolist() == [False, True, False] and not out[2].any()
    x.requires_grad_()
    moe.combine_rows(x, torch.tensor([[0], [1], [1]], device=DEVICE), weights).sum().backward()
    assert x.grad.isnan().all(1).tolist() == [False, True, False] and not x.grad[2].any()
    assert moe.permute_rows(x, torch.tensor([0, 0, 2], device=DEVICE)).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_name", quant.FORMATS)
@pytest.mark.parametrize(
    "shape, group", [((0, 5), 2), ((1, 1), 0), ((7, 33), 5), ((300, 129), 64), ((1024, 512), 64), ((3, 50_001), 0)]
)
def test_quantization_by_groups(shape, group, format_name, dtype):
    """Codes, scales and values have the host's bits, to the nearest and at random, also with given scales."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    if x.numel() > 100:
        x.view(-1)[:: x.numel() // 7] = torch.tensor(float("inf"))
    for symmetric, scale_type, seed in itertools.product((True, False), ("float32", "float16", "e8m0"), (None, 7)):
        if not symmetric and (scale_type == "e8m0" or not format_name.startswith("int")):
            continue
        how = {"group": group, "symmetric": symmetric, "scale_type": scale_type, "seed": seed, "offset": 3}
        results = []
        for device in ("cpu", DEVICE):
            own = x.to(device)
            found = quant.quantize(own, format_name, **how)
            given = quant.fake_quantize_with(own * 1.5, found.scales, found.zero_points, format_name, group=group)
            zeros = () if symmetric else (found.zero_points,)
            results.append((found.codes.view(torch.uint8), found.scales, *zeros, quant.dequantize(found, dtype), given))
            results[-1] += (quant.fake_quantize(own, format_name, **how),)
        for i, (wanted, got) in enumerate(zip(*results, strict=True)):
            assert_same(got, wanted, f"result {i} of {how}")


def test_quantization_is_computed_by_kernels_on_the_current_stream():
    """Neither a formula nor a copy to the host: a graph captures the calls, and a replay reads the new elements."""
    x = torch.randn(64, 256, device=DEVICE)

    def layer():
        quantized = quant.quantize(x, "int4", group=32)
        return quantized.codes, quant.dequantize(quantized), quant.fake_quantize(x, "e4m3", group=32)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layer()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for i, (got, wanted) in enumerate(zip(outs, layer(), strict=True)):
        assert_same(got, wanted.cpu(), f"result {i}")
