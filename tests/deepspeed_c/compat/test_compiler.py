"""deepspeed_c.compat.compiler: what a compiler traces with it, counted by a backend."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.compat import compiler


@pytest.fixture
def graphs():
    """A backend that keeps the graphs it was given and runs them as they are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        found.append(graph)
        return graph.forward

    backend.found = found
    yield backend
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "decorate, n_graphs",
    [
        (compiler.disable, 2), (compiler.enable, 1), (compiler.enable(), 1), (compiler.enable("2.7.0"), 1),
        (compiler.enable("999.0"), 2),
    ],
)  # fmt: skip
def test_a_disabled_function_ends_a_graph(graphs, decorate, n_graphs: int) -> None:
    def double_here(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    called = decorate(double_here)
    compiled = compiler.compile()(lambda x: called(x + 1) + 1, backend=graphs)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 5.0))
    assert len(graphs.found) == n_graphs


def test_a_function_knows_whether_it_is_traced(graphs) -> None:
    def tell(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if compiler.is_compiling() else x - 1

    assert float(tell(torch.zeros(()))) == -1
    assert float(torch.compile(tell, backend=graphs)(torch.zeros(()))) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_backward_passes_are_compiled_within(graphs, enabled: bool) -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    x = torch.arange(10.0).view(2, 5)
    (wanted,) = torch.autograd.grad(torch.tanh(x @ weight).sum(), weight)
    before = get_accelerator().get_compile_backend()
    try:
        get_accelerator().set_compile_backend("eager")
        with compiler.compiled_autograd(enabled, {"dynamic": False}):
            torch.tanh(x @ weight).sum().backward()
    finally:
        get_accelerator().set_compile_backend(before)
    assert torch.equal(weight.grad, wanted), (weight.grad, wanted)
    n_traced = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    assert n_traced == enabled, n_traced
