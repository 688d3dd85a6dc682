"""profile/flops.py: MACs of whole models in forward and in backward, compared with formulas by hand. A module under two
parents, recomputation and compiled models are counted too, and torch is the same afterwards.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import flop_counter
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from deepspeed_c.errors import ConfigError, ModelError, StateError
from deepspeed_c.ops import nn as our_nn
from deepspeed_c.profile.flops import (
    FlopsProfiler,
    get_model_profile,
    get_module_duration,
    get_module_flops,
    get_module_macs,
    wrapFunc,
)
from deepspeed_c.profile.flops_counter import FlopsCounter
from tests import toys

B, T = 3, 7


def profiled(model, *args, backward=True, **kwargs):
    """Returns (MACs of forward, MACs of backward, MACs of recomputation)."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    try:
        outputs = model(*args, **kwargs)
        if backward:
            first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            getattr(first, "last_hidden_state", getattr(first, "logits", first)).sum().backward()
        profiler.stop_profile()
        return profiler.get_total_macs(), profiler.get_backward().macs, profiler.get_recomputed().macs
    finally:
        profiler.end_profile()


def check(got, formula):
    print("counted", got, "formula", formula)
    assert got == formula


def tokens(n_words, batch=B, length=T):
    return torch.randint(0, n_words, (batch, length))


# -- forward: formulas of architectures ---------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 5)), (torch.randn(B, 7),), {}, B * (7 * 11 + 11 * 5)


def conv_net():
    model = nn.Sequential(nn.Conv2d(3, 6, 5, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 7 * 8, 10))
    return model, (torch.randn(B, 3, 15, 17),), {}, B * (6 * 3 * 25 * 7 * 8 + 6 * 7 * 8 * 10)


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.short = nn.Conv2d(4, 8, 1, stride=2, bias=False)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def resnet_block():
    out = 5 * 6  # output places of an input of 9 x 11
    return ResidualBlock(), (torch.randn(B, 4, 9, 11),), {}, B * out * (8 * 4 * 9 + 8 * 8 * 9 + 8 * 4)


def unusual_convolutions():
    model = nn.Sequential(
        nn.Conv2d(6, 6, 3, groups=6),  # 9 x 8 -> 7 x 6
        nn.Conv2d(6, 9, (3, 1), groups=3, dilation=2),  # -> 3 x 6
        nn.ConvTranspose2d(9, 4, 3, stride=2, padding=1, output_padding=1),  # for each of 3 x 6 places of the input
        nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),  # for each of 6 x 12 places
    )
    macs = 7 * 6 * 6 * 9 + 3 * 6 * 9 * 2 * 3 + 3 * 6 * 9 * 4 * 9 + 6 * 12 * 4 * 3 * 4
    return model, (torch.randn(B, 6, 9, 8),), {}, B * macs


def lstm():
    model = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True)
    return model, (torch.randn(B, T, 5),), {}, B * T * 2 * (4 * 6 * (5 + 6) + 4 * 6 * (12 + 6))


def gru():
    return nn.GRU(5, 6), (torch.randn(T, B, 5),), {}, B * T * 3 * 6 * (5 + 6)


class SelfAttention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(12, 3, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)


def attention(need_weights=False):
    return SelfAttention(need_weights), (torch.randn(B, T, 12),), {}, B * T * (4 * 12 * 12 + 2 * T * 12)


def attention_with_weights():
    return attention(need_weights=True)


D, V, L = 16, 37, 2  # width, vocabulary, layers


def gpt2():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=L, n_head=2))
    return model, (tokens(V),), {"use_cache": False}, B * T * (L * (12 * D * D + 2 * T * D) + D * V)


def llama():
    model = toys.llama(vocab_size=V, hidden_size=D, intermediate_size=24, num_hidden_layers=L)
    layer = 2 * D * D + 2 * D * (D // 2) + 3 * D * 24 + 2 * T * D
    return model, (tokens(V),), {"use_cache": False}, B * T * (L * layer + D * V)


def bert():
    model = BertModel(
        BertConfig(vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=2, intermediate_size=24)
    )
    return model, (tokens(V),), {}, B * (T * L * (4 * D * D + 2 * D * 24 + 2 * T * D) + D * D)


def t5():
    inner, n_out = 2 * 8, 5
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=V, d_model=D, d_kv=8, d_ff=24, num_layers=L, num_heads=2, decoder_start_token_id=0)
    )
    encoder = T * L * (4 * D * inner + 2 * T * inner + 2 * D * 24)
    decoder = n_out * L * (4 * D * inner + 2 * n_out * inner + 2 * D * inner + 2 * T * inner + 2 * D * 24)
    keys_of_encoder = T * L * 2 * D * inner
    inputs = {"decoder_input_ids": tokens(V, length=n_out), "use_cache": False}
    return model, (tokens(V),), inputs, B * (encoder + decoder + keys_of_encoder + n_out * D * V)


def vit():
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=D,
            num_hidden_layers=L,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=12,
            patch_size=4,
            num_labels=5,
        )
    )
    n = 9 + 1  # patches and the class token
    macs = 9 * D * 3 * 16 + n * L * (4 * D * D + 2 * D * 24 + 2 * n * D) + D * 5
    return model, (torch.randn(B, 3, 12, 12),), {}, B * macs


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 5, 6))

    def forward(self, x):
        scores = torch.einsum("bhqd,bhkd->bhqk", *2 * (torch.einsum("btc,hcd->bhtd", x, self.w),))
        return scores


def einsum():
    return Einsum(), (torch.randn(B, T, 5),), {}, B * T * 2 * 5 * 6 + B * 2 * T * T * 6


def tied():
    model = toys.Chain(words=nn.Embedding(V, D), head=nn.Linear(D, V, bias=False))
    model.head.weight = model.words.weight
    return model, (tokens(V),), {}, B * T * D * V


ARCHITECTURES = (
    *(mlp, conv_net, resnet_block, unusual_convolutions, lstm, gru, attention, attention_with_weights, gpt2, llama),
    *(bert, t5, vit, einsum, tied),
)


@pytest.mark.parametrize("make", ARCHITECTURES, ids=lambda make: make.__name__)
def test_macs_of_forward_equal_the_formula(make):
    model, args, kwargs, formula = make()
    check(profiled(model, *args, **kwargs)[0], formula)
    model.eval()  # torch uses other kernels in eval, under no_grad and in inference mode
    with torch.no_grad():
        check(profiled(model, *args, backward=False, **kwargs)[0], formula)
    with torch.inference_mode():
        check(profiled(model, *args, backward=False, **kwargs)[0], formula)
    flops, macs, params = get_model_profile(
        model, args=args, kwargs=kwargs, print_profile=False, as_string=False, warm_up=0
    )
    check(macs, formula)
    assert params == sum(p.numel() for p in model.parameters()) and flops >= 2 * macs


def test_an_encoder_layer_in_torch_fast_path():
    model = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
    x = torch.randn(B, T, 12)
    with torch.no_grad():
        check(profiled(model, x, backward=False)[0], B * T * (4 * 144 + 2 * 12 * 20 + 2 * T * 12))


def test_products_with_vectors_and_a_bilinear_layer():
    class Vectors(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.Bilinear(4, 5, 3)

        def forward(self, m, v):
            return m @ v, torch.dot(v, v), torch.addmv(v, m, v), self.pairs(torch.ones(B, 4), torch.ones(B, 5))

    # A bilinear layer has two products, over its outputs and the inputs of both sides.
    check(profiled(Vectors(), torch.ones(6, 6), torch.ones(6), backward=False)[0], 36 + 6 + 36 + 2 * B * 3 * 4 * 5)


# -- backward -----------------------------------------------------------------------------------------------------------


def test_backward_is_counted_as_it_ran_and_is_not_twice_forward():
    model = nn.Sequential(nn.Linear(7, 11, bias=False), nn.Linear(11, 5))
    first, second = B * 7 * 11, B * 11 * 5
    check(profiled(model, torch.randn(B, 7))[1], first + 2 * second)  # the input requires no gradient
    check(profiled(model, torch.randn(B, 7, requires_grad=True))[1], 2 * first + 2 * second)
    model[1].requires_grad_(False)
    check(profiled(model, torch.randn(B, 7))[1], first + second)
    model[0].requires_grad_(False)
    check(profiled(model, torch.randn(B, 7, requires_grad=True))[1], first + second)


@pytest.mark.parametrize("make", [unusual_convolutions, lstm, gru], ids=lambda make: make.__name__)
def test_backward_of_layers_that_torch_counts_wrong(make):
    model, (x,), _, formula = make()
    counted = profiled(model, x.requires_grad_())
    # The gradient of a GRU's state is a product for each token except the first, which has no state before it.
    check(counted[:2], (formula, 2 * formula - (B * 3 * 6 * 6 if make is gru else 0)))


def test_backward_of_fused_attention_computes_the_scores_again():
    q, k, v = (torch.randn(B, 2, T, 4, requires_grad=True) for _ in range(3))
    pairs = B * 2 * T * T * 4

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    check(profiled(Attention(), q, k, v), (2 * pairs, 5 * pairs, 0))


def test_our_operators_are_counted():
    q, k, v = (torch.randn(B, 2, T, 4, requires_grad=True) for _ in range(3))
    pairs = B * 2 * T * T * 4

    class Ours(nn.Module):
        def forward(self, q, k, v):
            return our_nn.attention(q, k, v, causal=True)

    check(profiled(Ours(), q, k, v), (2 * pairs, 5 * pairs, 0))

    class Elementwise(nn.Module):
        def forward(self, x):
            y = our_nn.layer_norm(x, torch.ones(8), torch.ones(8))  # 5
            y = our_nn.rms_norm(y)  # 4
            y = our_nn.bias_gelu(y, torch.ones(8))  # 1 + 1
            y = our_nn.swiglu(y, y)  # 2
            return our_nn.masked_softmax(y.view(1, 1, -1, 8))  # 1

    profiler = FlopsProfiler(Elementwise())
    profiler.start_profile()
    profiler.model(torch.randn(5, 8))
    profiler.stop_profile()
    check((profiler.get_total_flops(), profiler.get_total_macs()), (5 * 8 * 14, 0))
    profiler.end_profile()


def test_elementwise_flops_are_those_of_deepspeed():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),  # 2 per MAC, 1 for the bias
        nn.BatchNorm2d(4),  # in training: 5
        nn.ReLU(),  # 1
        nn.MaxPool2d(2),  # 1 per input
        nn.Flatten(),
        nn.LayerNorm(4 * 3 * 3),  # 5
        nn.Softmax(-1),  # 1
    )
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(B, 3, 6, 6))
    profiler.stop_profile()
    places, pooled = B * 36 * 4, B * 9 * 4
    check(profiler.get_total_flops(), 2 * places * 27 + places * (1 + 5 + 1 + 1) + pooled * (5 + 1))
    profiler.end_profile()


# -- the tree -----------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer under two parents."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(5, 5)
        self.a, self.b = nn.Sequential(layer), nn.Sequential(layer, nn.ReLU())

    def forward(self, x):
        return self.b(self.a(x)) + self.b(x)


def test_a_layer_under_two_parents_counts_once():
    model = Shared()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    x = torch.randn(B, 5, requires_grad=True)
    model(x).sum().backward()
    profiler.stop_profile()
    once = B * 25
    check(
        [get_module_macs(each) for each in (model, model.a, model.b, model.a[0])], [3 * once, once, 2 * once, 3 * once]
    )
    check(profiler.get_backward().macs, 6 * once)
    assert profiler.get_total_params() == 30
    assert get_module_flops(model.b[1]) == 2 * B * 5
    assert get_module_duration(model) >= get_module_duration(model.a) > 0
    profiler.end_profile()
    assert not [each for each in model.modules() if any("flops" in name for name in vars(each))]


def test_modules_of_the_backward_are_those_of_the_forward():
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 3)), nn.Linear(3, 2))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        model(torch.randn(B, 4)).sum().backward()
    profiler.stop_profile()
    counter = profiler._counter
    by_module = {id(each.module): [count.macs for count in each.all] for each in counter.counts()}
    found = [by_module[id(each)] for each in (model[0], model[1], model[1][0], model[1][1], model[2])]
    check(found, [[2 * n, 2 * m, 0] for n, m in ((72, 72), (54, 108), (0, 0), (54, 108), (18, 36))])
    profiler.end_profile()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_count_as_torch_counts_them(dtype):
    """Our formulas replace torch's for products, because torch's formulas flatten the arguments of each call."""
    a, b, c = (torch.randn(shape, dtype=dtype) for shape in ((5, 3), (3, 7), (1, 7)))
    many_a, many_b, many_c = (torch.randn(shape, dtype=dtype) for shape in ((2, 5, 3), (2, 3, 7), (2, 1, 7)))
    none = torch.zeros(0, 3, dtype=dtype)
    calls = {
        "mm": (5 * 3 * 7, lambda: torch.mm(a, b)),
        "mm of a transposed": (5 * 3 * 7, lambda: torch.mm(b.t(), a.t())),
        "mm of no rows": (0, lambda: torch.mm(none, b)),
        "addmm": (5 * 3 * 7, lambda: torch.addmm(c, a, b, beta=2, alpha=3)),
        "bmm": (2 * 5 * 3 * 7, lambda: torch.bmm(many_a, many_b)),
        "baddbmm": (2 * 5 * 3 * 7, lambda: torch.baddbmm(many_c, many_a, many_b)),
    }
    for name, (macs, call) in calls.items():
        theirs = FlopCounterMode(display=False)
        with theirs:
            call()
        model = Called(call)
        ours, _, _ = get_model_profile(model, args=[a], print_profile=False, as_string=False, warm_up=0)
        assert ours == theirs.get_total_flops() == 2 * macs, (name, ours, theirs.get_total_flops(), 2 * macs)


class Called(nn.Module):
    """A model that ignores its input."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, _):
        return self.call()


@pytest.mark.parametrize("operator", ["mm", "addmm"])
def test_counting_a_product_takes_no_call_apart(operator, monkeypatch):
    """torch's shape_wrapper walks all arguments as a tree. That would take longer than a small product."""
    walks = []
    monkeypatch.setattr(flop_counter, "tree_map", lambda *args: walks.append(args) or tree_map(*args))
    a = torch.randn(3, 3)
    call = {"mm": lambda: torch.mm(a, a), "addmm": lambda: torch.addmm(a, a, a)}[operator]
    flops, _, _ = get_model_profile(Called(call), args=[a], print_profile=False, as_string=False)
    assert (flops, len(walks)) == (54, 0), (flops, len(walks))


def test_ignored_modules_count_as_their_parents():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 2))
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear])
    model(torch.randn(B, 4))
    profiler.stop_profile()
    check(
        [get_module_macs(each) for each in (model, model[0])] + [get_module_flops(model[0][0])],
        [B * (24 + 12), B * 24, 0],
    )
    assert "Linear(30" in profiler.report()
    profiler.end_profile()


class Recomputed(nn.Module):
    """Recomputes a block of modules and a function that calls a module; another function is not recomputed."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.block, self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 5)
        self.weight, self.flag = nn.Parameter(torch.randn(5, 5)), {"use_reentrant": use_reentrant}

    def forward(self, x):
        x = checkpoint(self.block, x, **self.flag)
        x = checkpoint(lambda x: torch.tanh(F.linear(self.inner(x), self.weight)), x, **self.flag)
        return x.sin()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_a_column_of_its_own(use_reentrant):
    model = Recomputed(use_reentrant)
    forward = B * (2 * 5 * 6 + 2 * 5 * 5)
    check(profiled(model, torch.randn(B, 5, requires_grad=True)), (forward, 2 * forward, forward))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(B, 5, requires_grad=True)).sum().backward()
    profiler.stop_profile()
    by_module = {id(each.module): [count.macs for count in each.all] for each in profiler._counter.counts()}
    check(
        [by_module[id(each)] for each in (model.block, model.block[0], model.inner)],
        [[n, 2 * n, n] for n in (B * 60, B * 30, B * 25)],
    )
    profiler.end_profile()


def test_a_backward_that_makes_a_graph_is_no_recomputation():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    x = torch.randn(B, 5, requires_grad=True)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    check((profiler.get_backward().macs, profiler.get_recomputed().macs), (2 * B * 25, 0))
    profiler.end_profile()
    assert gradient.requires_grad


def test_a_compiled_model_is_counted_by_the_operators_behind_it():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(B, 5, requires_grad=True)
    expected = compiled(x)  # compiled before the profile, and used after it
    check(profiled(compiled, x), (B * 60, 2 * B * 60, 0))
    torch.testing.assert_close(compiled(x), expected)


# -- torch and the model are unchanged afterwards ----------------------------------------------------------------------


def test_torch_is_untouched():
    names = [
        (torch, "matmul"),
        (torch, "bmm"),
        (torch, "mm"),
        (torch, "addmm"),
        (torch, "einsum"),
        (torch.Tensor, "matmul"),
    ]
    names += [(torch.Tensor, "__matmul__"), (torch.Tensor, "bmm"), (F, "linear"), (F, "softmax"), (F, "gelu")]
    before = [getattr(where, name) for where, name in names]
    hooks = (
        copy.copy(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
    )
    model = mlp()[0]
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert all(getattr(where, name) is f for (where, name), f in zip(names, before, strict=True))
    model(torch.randn(B, 7)).sum().backward()
    profiler.end_profile()
    assert all(getattr(where, name) is f for (where, name), f in zip(names, before, strict=True))
    assert torch.bmm is not torch.matmul
    assert hooks == (
        torch.nn.modules.module._global_forward_hooks,
        len(torch.nn.modules.module._global_forward_pre_hooks),
    )
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_an_exception_in_forward_leaves_no_module_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("here")

    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), Fails()))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(ValueError, match="here"):
        model(torch.randn(B, 5))
    model[1] = nn.Linear(5, 5)  # came after the start, so it is not counted
    model[0](torch.randn(B, 5))
    check(get_module_macs(model[0]), 2 * B * 25)
    profiler.end_profile()


def test_a_mode_that_was_entered_later_stays_where_it_is():
    model = mlp()[0]
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    other = FlopsCounter(model)
    with other:
        profiler.stop_profile()
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack()[-1] is other
        model(torch.randn(B, 7))
    check(profiler.get_total_macs(), 0)
    profiler.end_profile()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_wrapped_function_counts_by_its_own_formula():
    called = []

    def kernel(x, y):
        called.append(x)
        return x @ y

    counted = wrapFunc(kernel, lambda x, y: (1000, 7))

    class Model(nn.Module):
        def forward(self, x):
            return counted(x, x) + x @ x

    profiler = FlopsProfiler(Model())
    profiler.start_profile()
    profiler.model(torch.randn(4, 4))
    profiler.stop_profile()
    check((profiler.get_total_flops(), profiler.get_total_macs()), (1000 + 2 * 64 + 16, 7 + 64))
    profiler.end_profile()
    counted(torch.ones(2, 2), torch.ones(2, 2))
    assert len(called) == 2


# -- the functions ------------------------------------------------------------------------------------------------------


def test_numbers_between_start_and_end():
    model = mlp()[0]
    profiler = FlopsProfiler(model, recompute_fwd_factor=0.5)
    with pytest.raises(StateError, match="start_profile"):
        profiler.get_total_flops()
    with pytest.raises(StateError, match="not being profiled"):
        get_module_flops(model)
    profiler.print_model_profile()  # prints nothing before the start, as DeepSpeed
    profiler.start_profile()
    model(torch.randn(B, 7))
    assert profiler.get_total_macs(as_string=True) == "396 MACs"
    assert profiler.get_total_params(as_string=True) == "148"
    profiler.reset_profile()
    assert profiler.get_total_macs() == 0
    model(torch.randn(B, 7))
    assert profiler.get_total_macs() == 396  # goes on counting
    assert profiler.get_total_duration() > 0 and profiler.get_total_duration(as_string=True).endswith("s")
    profiler.end_profile()
    profiler.end_profile()


def test_generation_is_counted_token_by_token():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=16, n_embd=D, n_layer=1, n_head=2))
    kwargs = {
        "input_ids": tokens(V, batch=1),
        "max_new_tokens": 2,
        "min_new_tokens": 2,
        "do_sample": False,
        "pad_token_id": 0,
    }
    _, macs, _ = get_model_profile(
        model, kwargs=kwargs, mode="generate", print_profile=False, as_string=False, warm_up=0
    )
    first = T * (12 * D * D + 2 * T * D) + D * V  # logits only of the last token
    check(macs, first + 12 * D * D + 2 * (T + 1) * D + D * V)


def test_an_input_shape_and_text():
    found = get_model_profile(mlp()[0], input_shape=(B, 7), print_profile=False)
    assert found == ("825 ", "396 MACs", "148")  # 2 * 396, and 33 for the ReLU


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "has no input"),
        ({"input_shape": [2, 7]}, "input_shape"),
        ({"input_shape": ()}, "input_shape"),
        ({"input_shape": (2, 7), "mode": "train"}, "mode"),
    ],
)
def test_bad_input(kwargs, words):
    model = mlp()[0]
    with pytest.raises(ModelError, match=words):
        get_model_profile(model, print_profile=False, **kwargs)
    assert model.training
    with pytest.raises(ModelError, match="Module"):
        get_model_profile(lambda x: x, **kwargs)


def test_the_report_goes_to_a_file(tmp_path, capsys):
    file = tmp_path / "new" / "report.txt"
    get_model_profile(mlp()[0], input_shape=(B, 7), output_file=str(file))
    text = file.read_text()
    assert "fwd MACs per GPU" in text and "396 MACs" in text and "(2): Linear(60 = 40.54% Params" in text
    assert capsys.readouterr().out == ""
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match="output_file"):
        get_model_profile(mlp()[0], input_shape=(B, 7), output_file=str(tmp_path / "a file" / "x"))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
