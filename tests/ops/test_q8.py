"""Optimizer states of 8 bits.

Compares the operators with the float64 formulas, and a step with three steps: read the codes, step in float32, write
the codes. Also covers loading, refused arguments and learning.
"""

from __future__ import annotations

import copy
import io
import pickle
import sysconfig
from pathlib import Path

import pytest
import torch

from deepspeed_c import _C
from deepspeed_c.errors import OptimizerError, StateError
from deepspeed_c.ops import q8, reference
from deepspeed_c.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.ops.lamb import FusedLamb
from deepspeed_c.ops.lion import FusedLion
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.sgd import FusedSGD
from tests.ops.data import bits, normal
from tests.training import descend

SIZES = (0, 1, 255, 256, 257, 1021, 70_001)

MAKERS = {
    "adamw": lambda p, dtype: FusedAdam(p, lr=0.01, weight_decay=0.1, state_dtype=dtype),
    "adam": lambda p, dtype: FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False, state_dtype=dtype),
    "lion": lambda p, dtype: FusedLion(p, lr=0.01, weight_decay=0.1, state_dtype=dtype),
    "sgd": lambda p, dtype: FusedSGD(p, lr=0.01, momentum=0.9, nesterov=True, state_dtype=dtype),
}


def moments(n, seed, is_signed):
    """Magnitudes over several powers of ten, with some zeros."""
    values = normal(n, seed) ** 5
    values[::17] = 0.0
    return values if is_signed else values.abs()


def quantized(values, is_signed):
    codes = torch.zeros(values.numel(), dtype=torch.int8 if is_signed else torch.uint8)
    scales = torch.full((q8.n_scales(values.numel()),), float("nan"))
    q8.quantize_(codes, scales, values)
    return codes, scales


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_codes_are_the_formula_and_come_back(n, is_signed):
    values = moments(n, n, is_signed)
    codes, scales = quantized(values, is_signed)
    want_codes, want_scales = reference.q8_quantize(values.double(), is_signed)
    assert torch.equal(scales.double(), want_scales)
    # float32 and float64 roots round to different codes only for values half-way between two codes.
    off = codes.double() - want_codes
    assert int((off != 0).sum()) <= 1 + n // 2000 and (n == 0 or float(off.abs().max()) <= 1), off[off != 0]
    back = q8.dequantize(codes, scales)
    want = reference.q8_dequantize(codes.double(), scales.double(), is_signed)
    torch.testing.assert_close(back.double(), want, rtol=2e-6, atol=0)
    again = quantized(back, is_signed)
    assert torch.equal(again[0], codes) and torch.equal(bits(again[1]), bits(scales))


def test_ranges_are_parts_of_the_whole():
    values = moments(1000, 3, False)
    codes, scales = quantized(values, False)
    whole = q8.dequantize(codes, scales)
    for begin, end in ((0, 0), (0, 1), (3, 700), (256, 512), (511, 1000), (1000, 1000)):
        assert torch.equal(q8.dequantize(codes, scales, begin, end), whole[begin:end])
    rows = (torch.zeros_like(codes), torch.zeros_like(scales))
    for begin, end in ((512, 1000), (0, 256), (256, 512)):
        q8.quantize_(*rows, values[begin:end].clone(), begin)
    assert torch.equal(rows[0], codes) and torch.equal(rows[1], scales)


@pytest.mark.parametrize(
    "begin, n, word",
    [(0, 100, "whole blocks"), (100, 156, "whole blocks"), (256, 500, "whole blocks"), (-256, 256, "whole blocks")],
)
def test_range_that_cuts_a_block_is_refused(begin, n, word):
    codes, scales = quantized(moments(1000, 3, True), True)
    kept = codes.clone(), scales.clone()
    with pytest.raises(ValueError, match=word):
        q8.quantize_(codes, scales, torch.ones(n), begin)
    assert torch.equal(codes, kept[0]) and torch.equal(scales, kept[1])


def test_operators_name_what_does_not_fit():
    codes, scales = quantized(moments(300, 3, False), False)
    call = torch.ops.deepspeed_c
    with pytest.raises(ValueError, match=r"values\[7\] is -1"):
        call.q8_quantize_(torch.ones(300).index_fill_(0, torch.tensor([7]), -1.0), codes, scales)
    with pytest.raises(ValueError, match="300 contiguous ones of float32"):
        call.q8_quantize_(torch.ones(300, dtype=torch.float64), codes, scales)
    with pytest.raises(ValueError, match="2 contiguous ones of float32"):
        call.q8_quantize_(torch.ones(300), codes, scales[:1])
    with pytest.raises(ValueError, match="codes of int8"):
        call.q8_quantize_(torch.ones(300), codes.short(), scales)
    for begin, n in ((-1, 3), (299, 2), (301, 0)):
        with pytest.raises(ValueError, match="begin"):
            call.q8_dequantize_(codes, scales, begin, torch.empty(n))


# -- the optimizers -----------------------------------------------------------------------------------------------------

SHAPES = ((300, 3), (), (0,), (257,), (2, 3, 8, 9))


def make_params():
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    params[-1] = torch.nn.Parameter(params[-1].detach().to(memory_format=torch.channels_last))
    return params


def set_grads(params, seed):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape)  # its memory order differs from the last parameter's


def q8_names(optimizer):
    return list(optimizer.q8_dtypes)


def all_bits(optimizer, params):
    return [bits(p) for p in params] + [
        bits(torch.as_tensor(optimizer.state[p][key])) for p in params for key in sorted(optimizer.state[p])
    ]


@pytest.mark.parametrize("name", MAKERS)
def test_step_is_the_fp32_step_between_reading_and_writing(name):
    params, twins = make_params(), make_params()
    optimizer, twin = MAKERS[name](params, torch.int8), MAKERS[name](twins, torch.float32)
    for seed in range(4):
        set_grads(params, seed)
        set_grads(twins, seed)
        for p, t in zip(params, twins):
            for key in q8_names(optimizer) if seed else ():
                twin.state[t][key].copy_(optimizer.dequantized_state(p, key))
        optimizer.step()
        twin.step()
        for p, t in zip(params, twins):
            assert torch.equal(bits(p), bits(t)), f"step {seed}, {tuple(p.shape)}"
            assert optimizer.state[p]["step"] == seed + 1
            for key in q8_names(optimizer):
                state = optimizer.state[p]
                assert state[key].shape == p.shape and state[key].dtype == optimizer.q8_dtypes[key]
                want = torch.zeros_like(state[key]), torch.zeros_like(state[q8.scale_name(key)])
                q8.quantize_(*want, q8.in_memory_order(twin.state[t][key]))
                assert torch.equal(state[key], want[0]) and torch.equal(state[q8.scale_name(key)], want[1])


def test_any_number_of_threads_gives_the_same_bits():
    results = []
    try:
        for n_threads in (1, 3):
            _C.pool_resize(n_threads)
            params = [torch.nn.Parameter(normal(n, n)) for n in (257, 100_003, 31, 70_001)]
            optimizer = MAKERS["adamw"](params, torch.int8)
            for seed in range(2):
                set_grads(params, seed)
                optimizer.step()
            results.append(all_bits(optimizer, params))
    finally:
        _C.pool_resize(0)
    assert all(map(torch.equal, *results))


def test_pieces_with_copies_and_gradients_of_two_dtypes():
    params, twins = make_params(), make_params()
    optimizer, twin = (MAKERS["adamw"](p, torch.int8) for p in (params, twins))
    set_grads(twins, 1)
    for t in twins:
        t.grad = t.grad.bfloat16().float()
    twin.step()
    set_grads(params, 1)
    grads = [p.grad.bfloat16() if i % 2 else p.grad.bfloat16().float() for i, p in enumerate(params)]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) if i < 3 else None for i, p in enumerate(params)]
    optimizer.begin_step()
    optimizer.step_tensors(0, params[2:], [2 * g for g in grads[2:]], copies[2:], 0.5)
    optimizer.step_tensors(0, params[:2], [2 * g for g in grads[:2]], copies[:2], 0.5)
    assert all(map(torch.equal, all_bits(optimizer, params), all_bits(twin, twins)))
    assert all(torch.equal(c, p.detach().bfloat16()) for c, p in zip(copies[:3], params))


def test_states_take_a_quarter_of_the_bytes():
    params = [torch.nn.Parameter(torch.zeros(100_000))]
    optimizer = MAKERS["adamw"](params, torch.int8)
    set_grads(params, 0)
    optimizer.step()
    state = optimizer.state[params[0]]
    layout = optimizer.layout_of_state(0, params[0])
    assert layout == {key: (state[key].dtype, state[key].numel()) for key in state if key != "step"}
    assert sum(dtype.itemsize * n for dtype, n in layout.values()) == 2 * (100_000 + 4 * 391)
    wide = MAKERS["adamw"](params, None).layout_of_state(0, params[0])
    assert wide == {"exp_avg": (torch.float32, 100_000), "exp_avg_sq": (torch.float32, 100_000)}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("way", ["state_dict", "file", "pickle", "deepcopy"])
def test_state_goes_on_bit_for_bit(name, way):
    params = make_params()
    optimizer = MAKERS[name](params, torch.int8)
    for seed in range(2):
        set_grads(params, seed)
        optimizer.step()
    if way == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    elif way == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        saved = copy.deepcopy(optimizer.state_dict())  # torch's state dicts share their tensors with the optimizer
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        other = MAKERS[name]([torch.nn.Parameter(p.detach().clone()) for p in params], torch.int8)
        other.load_state_dict(saved)
    others = other.param_groups[0]["params"]
    assert all(map(torch.equal, all_bits(optimizer, params), all_bits(other, others)))
    assert all(
        other.state[t][k].data_ptr() != optimizer.state[p][k].data_ptr()
        for p, t in zip(params[:1], others)
        for k in q8_names(other)
    )
    for some, opt in ((params, optimizer), (others, other)):
        set_grads(some, 9)
        opt.step()
    assert all(map(torch.equal, all_bits(optimizer, params), all_bits(other, others)))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_load_across_dtypes(name, dtype):
    params, twins = make_params(), make_params()
    optimizer, wide = MAKERS[name](params, torch.int8), MAKERS[name](twins, dtype)
    set_grads(params, 1)
    optimizer.step()
    wide.load_state_dict(optimizer.state_dict())
    back = MAKERS[name](make_params(), torch.int8)
    back.load_state_dict(wide.state_dict())
    for p, t, b in zip(params, twins, back.param_groups[0]["params"]):
        assert not [key for key in wide.state[t] if key.endswith("_scale")]
        for key in q8_names(optimizer):
            assert wide.state[t][key].dtype == dtype
            assert torch.equal(wide.state[t][key], optimizer.dequantized_state(p, key).to(dtype))
            want = optimizer.dequantized_state(p, key).to(dtype).float()
            back_want = torch.zeros_like(optimizer.state[p][key]), torch.zeros_like(back.state[b][q8.scale_name(key)])
            q8.quantize_(*back_want, q8.in_memory_order(want))
            assert torch.equal(back.state[b][key], back_want[0])
            assert torch.equal(back.state[b][q8.scale_name(key)], back_want[1])
        assert wide.state[t]["step"] == 1 and back.state[b]["step"] == 1


def test_conversion_in_ranges_is_exact():
    param = torch.nn.Parameter(normal(1000, 1))
    optimizer = MAKERS["adamw"]([param], torch.int8)
    set_grads([param], 1)
    optimizer.step()
    kept = all_bits(optimizer, [param])
    for key in q8_names(optimizer):
        whole = optimizer.dequantized_state(param, key)
        parts = [optimizer.dequantized_state(param, key, begin, begin + 100) for begin in range(0, 1000, 100)]
        assert torch.equal(torch.cat(parts), whole)
        optimizer.state[param][key].zero_()
        optimizer.state[param][q8.scale_name(key)].zero_()
        optimizer.quantize_state_(param, key, whole[512:], 512)
        optimizer.quantize_state_(param, key, whole[:512])
    assert all(map(torch.equal, all_bits(optimizer, [param]), kept))
    # Values whose memory order and dtype differ from the parameter's.
    image = make_params()[-1]
    other = MAKERS["lion"]([image], torch.int8)
    other.init_state(0, image)
    values = torch.randn(image.shape, dtype=torch.float64)
    other.quantize_state_(image, "exp_avg", values)
    assert float((other.dequantized_state(image, "exp_avg") - values).abs().max()) < 0.1


def test_what_has_no_states_of_8_bits_says_why():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    for make, word in (
        (lambda: FusedLamb([weight], state_dtype=torch.int8), "rounded with them"),
        (lambda: DeepSpeedCPUAdagrad([weight], state_dtype=torch.int8), "only grows"),
        (lambda: Muon([weight], state_dtype=torch.int8), "orthogonalises"),
        (lambda: FusedAdam([weight], state_dtype=torch.uint8), "uint8"),
    ):
        with pytest.raises(OptimizerError, match=word):
            make()


def test_misuse_is_named_and_changes_nothing():
    param = torch.nn.Parameter(torch.ones(300))
    optimizer = MAKERS["adamw"]([param], torch.int8)
    with pytest.raises(StateError, match="exp_avg"):
        optimizer.dequantized_state(param, "exp_avg")
    set_grads([param], 1)
    optimizer.step()
    kept = all_bits(optimizer, [param])
    for values, begin, word in (
        (torch.ones(100), 0, "whole blocks"),
        (torch.ones(301), 0, "whole blocks"),
        (-torch.ones(300), 0, "negative"),
    ):
        with pytest.raises(OptimizerError, match=word):
            optimizer.quantize_state_(param, "exp_avg_sq", values, begin)
    with pytest.raises(OptimizerError, match="begin"):
        optimizer.dequantized_state(param, "exp_avg", 299, 302)
    optimizer.state[param]["exp_avg_scale"] = torch.ones(1)
    with pytest.raises(OptimizerError, match="2 contiguous ones of float32"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 1
    assert all(map(torch.equal, [bits(param)], kept[:1]))
    wide = MAKERS["adamw"]([param], torch.float32)
    wide.step()
    wide.state_dtype = torch.int8
    with pytest.raises(StateError, match="before the first step"):
        wide.step()


# -- learning -------------------------------------------------------------------------------------------------------------

CONTEXT = 8


def text():
    """Sources of the standard library, which every Python has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "ast.py", "inspect.py", "pathlib.py", "subprocess.py", "typing.py", "tarfile.py")
    found = b"\n".join((root / name).read_bytes() for name in names if (root / name).is_file())
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long()


def learn(data, state_dtype, steps=250):
    """Held-out loss, in nats a byte, of a small network that reads 8 bytes."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        *(torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(CONTEXT * 16, 96)),
        *(torch.nn.LayerNorm(96), torch.nn.GELU(), torch.nn.Linear(96, 256)),
    )
    optimizer = FusedAdam(net.parameters(), lr=3e-3, state_dtype=state_dtype)
    generator, cut = torch.Generator().manual_seed(2), len(data) * 9 // 10

    def loss(low, high, n):
        at = torch.randint(low, high - CONTEXT, (n, 1), generator=generator)
        windows = data[at + torch.arange(CONTEXT + 1)]
        return torch.nn.functional.cross_entropy(net(windows[:, :CONTEXT]), windows[:, CONTEXT])

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - 0.9 * step / steps)
        descend(optimizer, loss(0, cut, 64))
    with torch.no_grad():
        return float(loss(cut, len(data), 4096))


def test_small_states_learn_as_well_as_fp32():
    data = text()
    wanted = learn(data, torch.float32)
    assert wanted < 3.2  # 5.5 is the loss without learning, 3.3 with byte frequencies only
    for dtype in (torch.bfloat16, torch.int8):
        got = learn(data, dtype)
        assert abs(got / wanted - 1) < 0.005, f"{dtype}: {got:.4f} held out, float32 {wanted:.4f}"
