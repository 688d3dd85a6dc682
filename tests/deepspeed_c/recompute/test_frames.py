"""recompute/frames.py and reentrant.py: both flavours equal plain torch without checkpointing, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from typing_extensions import Self

from deepspeed_c.checkpointing import checkpoint
from deepspeed_c.config.checkpoint import ActivationCheckpointing
from deepspeed_c.errors import BackwardError, RecomputeError
from deepspeed_c.recompute.recomputer import Recomputer

WIDTH = 11
FLAVOURS = ("hooks", "reentrant")


def recomputer(flavour: str, **keys: Any) -> Recomputer:
    return Recomputer(ActivationCheckpointing(use_reentrant=flavour == "reentrant", **keys))


def caller(how: str) -> Callable:
    """A function ``call(function, *args, **kwargs)`` that calls plainly or recomputes."""
    if how == "plain":
        return lambda function, *args, **kwargs: function(*args, **kwargs)
    if how == "torch's reentrant":
        return lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)
    mine = recomputer(how)
    return lambda function, *args, **kwargs: mine.run(function, args, kwargs)


class Output(NamedTuple):
    value: torch.Tensor
    note: str


class Block(nn.Module):
    """Has dropout, a tanh that saves its output, and a branch that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.drop(torch.tanh(self.up(x)))
        return x + scale * self.down(y) * (y.detach().mean() > 0)


def blocks(n: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(n))


def one_after_another(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = call(layer, x, scale=0.7)
    return x


def nest(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    def function(inputs: dict, mask: None, *, others: tuple) -> dict:
        a, b = inputs["a"], inputs["b"][0]
        y = layers[0](a) * b + others[1]
        return {"out": [y, None], "named": Output(y.relu(), "as it was"), "n": 3}

    out = call(function, {"a": x, "b": [x[:, :1]]}, None, others=("text", x * 2))
    assert out["out"][1] is None and out["named"].note == "as it was" and out["n"] == 3
    assert type(out["named"]) is Output
    return out["out"][0] + out["named"].value


def same_tensor_and_views(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple:
        assert a is b
        return layers[0](a) * b.t().t(), c.exp(), a

    y, z, same = call(function, x, x, x.t()[1:].t())
    return y[:, 1:] * z + same[:, 1:]


def within_another(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return call(layers[1], call(layers[0], t))

    return call(lambda t: call(inner, layers[2](t)) * t, x)


def used_twice(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return call(layers[0], call(layers[0], x)) + call(layers[0], x)


def whole_numbers(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    def function(t: torch.Tensor, order: torch.Tensor, keep: torch.Tensor) -> tuple:
        return (layers[0](t).gather(1, order) * keep, order + 1)

    y, order = call(function, x, x.detach().argsort(dim=1), x.detach() > -9)
    assert not order.requires_grad and not order.is_floating_point()
    return y + order


def no_input_requires_a_gradient(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return call(layers[0], x.detach()) + 0 * x


def parameter_as_argument(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return call(lambda t, w: (t @ w.t()).tanh() @ w, x, layers[0].up.weight)


def empty(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return x + call(layers[0], x[:0]).sum()


MODELS = {
    f.__name__: f
    for f in (
        *(one_after_another, nest, same_tensor_and_views, within_another, used_twice, whole_numbers),
        *(no_input_requires_a_gradient, parameter_as_argument, empty),
    )
}


def run(how: str, model: Callable, **backward: Any) -> list[torch.Tensor]:
    layers = blocks()
    torch.manual_seed(7)
    x = torch.randn(5, WIDTH, requires_grad=True)
    out = model(caller(how), layers, x * 1)
    drawn = torch.rand(3)  # the generator has the same state as without recomputation
    loss = out.square().sum()
    loss.backward(**backward)
    if backward:
        loss.backward()
    return [out.detach(), drawn, torch.rand(3), x.grad, *(p.grad for p in layers.parameters())]


def assert_same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        if b is None:
            assert a is None or not a.any(), f"number {i}"
        else:
            assert a is not None and a.dtype == b.dtype and torch.equal(a, b), (i, a, b)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_plain_torch(name: str, flavour: str) -> None:
    got, want = run(flavour, MODELS[name]), run("plain", MODELS[name])
    if (name, flavour) == ("used_twice", "reentrant"):
        # Each reentrant layer sums its gradients by itself, so the sums have another order.
        assert all(torch.allclose(a, b) for a, b in zip(got, want) if b is not None)
        want = run("torch's reentrant", MODELS[name])
    assert_same(got, want)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_two_backwards_through_a_retained_graph(flavour: str) -> None:
    assert_same(run(flavour, within_another, retain_graph=True), run("plain", within_another, retain_graph=True))


@pytest.mark.parametrize("around", ["torch", "ours"])
def test_within_a_checkpoint_of_torch_and_around_one(around: str) -> None:
    def theirs(function: Callable, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    ours = caller("hooks")
    outer, inner = (theirs, ours) if around == "torch" else (ours, theirs)

    def model(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return outer(lambda t: inner(layers[0], t) * inner(layers[1], t), x)

    def plain(call: Callable, layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return layers[0](x) * layers[1](x)

    assert_same(run("plain", model), run("plain", plain))


def grad_and_higher_order(how: str) -> list[torch.Tensor]:
    layers = blocks()
    torch.manual_seed(7)
    x = torch.randn(5, WIDTH, requires_grad=True)
    y = one_after_another(caller(how), layers, x)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
    first.sum().backward()
    return [first.detach(), second, x.grad, *(p.grad for p in layers.parameters())]


def test_autograd_grad_and_higher_order() -> None:
    assert_same(grad_and_higher_order("hooks"), grad_and_higher_order("plain"))


def test_autograd_grad_through_the_reentrant_flavour_is_an_error() -> None:
    x = torch.randn(5, WIDTH, requires_grad=True)
    y = caller("reentrant")(blocks()[0], x)
    with pytest.raises(BackwardError, match=r"(?s)recomputation of Block.*autograd.grad.*use_reentrant"):
        torch.autograd.grad(y.sum(), x)


def gradient_within(how: str) -> list[torch.Tensor]:
    """The gradients of a layer that runs a backward of its own."""
    layers = blocks()

    def function(t: torch.Tensor) -> torch.Tensor:
        y = layers[0](t).tanh()
        (slope,) = torch.autograd.grad(y.square().sum(), t, retain_graph=True, create_graph=True)
        return (y + slope).exp()

    torch.manual_seed(7)
    x = torch.randn(5, WIDTH, requires_grad=True)
    caller(how)(function, x).sum().backward()
    return [x.grad, *(p.grad for p in layers[0].parameters())]


def test_a_layer_that_differentiates_itself() -> None:
    assert_same(gradient_within("hooks"), gradient_within("plain"))


def test_the_callers_tensors_are_left_alone() -> None:
    x = torch.randn(5, WIDTH, requires_grad=True)
    y = x * 1
    before, place = y.detach().clone(), y.data_ptr()
    out = checkpoint(blocks()[0], y)
    assert torch.equal(y, before) and y.data_ptr() == place
    out.sum().backward()
    assert torch.equal(y, before) and y.data_ptr() == place and y.grad_fn is not None


class Counts:
    """Counts the bytes that autograd saves and holds, by hooks around everything."""

    def __init__(self) -> None:
        self.n_bytes = self.peak = 0

    class _Held:
        def __init__(self, counts: Counts, tensor: torch.Tensor) -> None:
            self.tensor, self.n_bytes = tensor.detach(), tensor.nbytes
            counts.n_bytes += self.n_bytes
            counts.peak = max(counts.peak, counts.n_bytes)
            weakref.finalize(self, counts.drop, self.n_bytes)

    def drop(self, n_bytes: int) -> None:
        self.n_bytes -= n_bytes

    def __enter__(self) -> Self:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: self._Held(self, t), lambda held: held.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_only_inputs_are_kept(flavour: str) -> None:
    saved = {}
    for how in ("plain", flavour):
        x = torch.randn(64, WIDTH, requires_grad=True)
        with Counts() as counts:
            out = one_after_another(caller(how), blocks(6), x)
        saved[how] = counts.n_bytes
        out.sum().backward()
        del out
        gc.collect()
        assert counts.n_bytes == 0, how
    assert saved[flavour] == 6 * x.nbytes, saved  # only the input of each layer is saved
    assert saved["plain"] > 8 * saved[flavour], saved


def test_what_a_partial_backward_leaves_is_freed_with_it() -> None:
    layers = blocks(1)
    x, other = (torch.randn(5, WIDTH, requires_grad=True) for _ in range(2))
    seen: list[weakref.ref] = []

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = layers[0](b).exp()  # exp saves its output
        seen.append(weakref.ref(y.untyped_storage()))
        return a.exp() + y

    out = checkpoint(function, x, other)
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert len(seen) == 2 and seen[1]() is None, "what nobody asked for outlived the pass"
    out.sum().backward()
    assert len(seen) == 3 and other.grad is not None


def test_a_graph_dies_with_its_outputs() -> None:
    layer = blocks(1)[0]
    x = torch.randn(5, WIDTH, requires_grad=True) * 1
    ref = weakref.ref(x.untyped_storage())
    out = checkpoint(lambda t: checkpoint(layer, layer(t)), x)
    out.sum().backward(retain_graph=True)
    del x
    gc.disable()
    try:
        del out
        assert ref() is None, "a cycle holds it"
    finally:
        gc.enable()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_backwards_in_several_threads(flavour: str) -> None:
    """Backward runs in several threads, each with its own graph, and in two threads through one graph."""

    def gradients(how: str) -> list[torch.Tensor]:
        layers = blocks(2)
        torch.manual_seed(7)
        inputs = [torch.randn(5, WIDTH, requires_grad=True) for _ in range(6)]
        losses = [one_after_another(caller(how), layers, x * 1).square().sum() for x in inputs]
        if how == "plain":
            return [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, inputs)]
        todo = [*losses, *losses[:2]]
        # A new thread has torch's default number of threads. Products may then round otherwise than in forward.
        same = {"initializer": torch.set_num_threads, "initargs": (torch.get_num_threads(),)}
        with ThreadPoolExecutor(len(todo), **same) as threads:
            for done in [threads.submit(loss.backward, retain_graph=True) for loss in todo]:
                done.result(timeout=300)
        return [x.grad / (2 if i < 2 else 1) for i, x in enumerate(inputs)]

    assert_same(gradients(flavour), gradients("plain"))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_inputs_go_through_the_hooks_around(flavour: str) -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.detach().clone()

    layers, x = blocks(2), torch.randn(5, WIDTH, requires_grad=True)
    y = x * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = one_after_another(caller(flavour), layers, y)
    with torch.no_grad():
        y.zero_()  # the layers have a copy
    torch.manual_seed(0)
    out.sum().backward()
    assert packed == [(5, WIDTH)] * 2 and x.grad is not None


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_frozen_layer_is_not_run_again(flavour: str) -> None:
    layer, x = blocks(1)[0].requires_grad_(False), torch.randn(5, WIDTH)
    assert not caller(flavour)(layer, x).requires_grad
    assert caller(flavour)(layer, x.requires_grad_()).requires_grad


def test_without_gradients_the_function_just_runs() -> None:
    layer, x = blocks(1)[0].eval(), torch.randn(5, WIDTH, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(checkpoint(layer, x), layer(x))
    with torch.inference_mode():
        assert torch.equal(checkpoint(layer, x), layer(x))


def test_within_torch_func() -> None:
    layer, x = blocks(1)[0].eval(), torch.randn(5, WIDTH)
    got, want = (
        torch.func.grad(lambda t, f=f: f(t).square().sum())(x) for f in (lambda t: checkpoint(layer, t), layer)
    )
    assert torch.equal(got, want)
    got, want = (torch.func.vmap(f)(x) for f in (lambda t: checkpoint(layer, t), layer))
    assert torch.equal(got, want)


class Changes(nn.Module):
    """Computes something else in each call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.n_calls = what, 0
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        if self.what == "fewer" and self.n_calls > 1:
            return self.lin(x)
        if self.what == "shape" and self.n_calls > 1:
            x = torch.cat([x, x])
        if self.what == "dtype" and self.n_calls > 1:
            return self.lin(x).double().tanh().exp().float()
        return self.lin(x).tanh().exp()


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("fewer", r"saved \d tensors in forward and \d when"),
        ("shape", r"shape \(5, 11\).*and one of shape \(10, 11\)"),
        ("dtype", r"torch.float32 .*torch.float64"),
    ],
)
def test_a_layer_that_does_something_else(what: str, pattern: str) -> None:
    x = torch.randn(5, WIDTH, requires_grad=True)
    out = checkpoint(Changes(what), x)
    with pytest.raises(RecomputeError, match=f"(?s)recomputation of Changes.*{pattern}"):
        out.sum().backward()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_overwritten_input(flavour: str) -> None:
    x = torch.randn(5, WIDTH, requires_grad=True) * 1
    out = caller(flavour)(blocks(1)[0], x)
    x.add_(1)
    with pytest.raises(RecomputeError, match=r"(?s)recomputation of Block: .*version 1; expected version 0"):
        out.sum().backward()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_exception_in_forward_or_in_the_recomputation_leaves_nothing(flavour: str) -> None:
    layer = blocks(1)[0]
    fails = {"at": 1}

    def function(t: torch.Tensor) -> torch.Tensor:
        y = layer(t)
        fails["at"] -= 1
        if fails["at"] == 0:
            raise KeyError("by the test")
        return y.exp()

    call, x = caller(flavour), torch.randn(5, WIDTH, requires_grad=True)
    with pytest.raises(KeyError):
        call(function, x)
    fails["at"] = 2
    out = call(function, x)
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    fails["at"] = -1
    torch.manual_seed(3)
    x.grad = None
    layer.zero_grad()
    call(function, x).sum().backward()
    got = x.grad.clone()
    torch.manual_seed(3)
    x.grad = None
    function(x).sum().backward()
    assert torch.equal(got, x.grad)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_autocast_is_that_of_the_forward(flavour: str) -> None:
    def once(how: str) -> list[torch.Tensor]:
        layers = blocks(2)
        torch.manual_seed(7)
        x = torch.randn(5, WIDTH, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = one_after_another(caller(how), layers, x)
        out.sum().backward()  # backward runs outside of autocast
        return [out.detach(), x.grad, *(p.grad for p in layers.parameters())]

    assert_same(once(flavour), once("plain"))


def test_compiled_without_a_break() -> None:
    layer, x = blocks(1)[0].eval(), torch.randn(5, WIDTH, requires_grad=True)
    mine = recomputer("hooks")
    compiled = torch.compile(lambda t: mine.run(layer, (t,), {}).square().sum(), backend="aot_eager", fullgraph=True)
    (got,) = torch.autograd.grad(compiled(x), x)
    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6), (got - want).abs().max()
