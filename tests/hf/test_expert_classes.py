"""Every class of experts of transformers with stacked weights, as routed experts: outputs and gradients of its own
forward."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.config.parallel import ExpertParallel
from deepspeed_c.moe.auto import RoutedExperts, as_routed
from deepspeed_c.moe.spread import find_experts
from tests.hf.stack import on_ranks

CLASS = re.compile(r"^@use_experts_implementation.*\n(?:@.*\n)*class (\w+)", re.MULTILINE)
N_TOKENS, N_EXPERTS, N_CHOSEN, WIDTH, INNER = 11, 4, 2, 8, 6
LEAST_CLASSES = 60


class AnySizes:
    """A configuration with each attribute that a class of experts asks for."""

    _experts_implementation = "eager"
    hidden_act = hidden_activation = mlp_hidden_act = activation_function = "silu"
    rms_norm_eps = norm_eps = post_norm_eps = 1e-6
    hidden_size = moe_hidden_size = moe_latent_size = WIDTH
    swiglu_limit = 1.5
    swiglu_alpha = 1.7
    mlp_gate_softcap = mlp_up_softcap = 2.0

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return N_EXPERTS if "expert" in name else INNER


def classes() -> list[tuple[str, str]]:
    """(module, class) of each class of experts, read from the sources."""
    spec = importlib.util.find_spec("transformers")
    if spec is None:
        return []
    root = Path(spec.origin).parent / "models"
    return [
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path in sorted(root.glob("*/modeling_*.py"))
        for name in CLASS.findall(path.read_text())
    ]


def made(module: str, name: str) -> torch.nn.Module:
    experts = getattr(importlib.import_module(module), name)(AnySizes())
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in experts.parameters():
            param.copy_(0.5 * torch.randn(param.shape, generator=rng))
    return experts


def run(experts: torch.nn.Module) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(N_TOKENS, WIDTH, generator=rng).requires_grad_()
    # Expert 2 has no tokens.
    scores = torch.rand(N_TOKENS, N_EXPERTS, generator=rng)
    scores[:, 2] = 0
    weights, indices = scores.topk(N_CHOSEN)
    weights.requires_grad_()
    out = experts(x, indices, weights)
    (out * torch.randn(out.shape, generator=rng)).sum().backward()
    grads = {name: param.grad for name, param in experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def compare_body(rank: int, world: int, names: list[tuple[str, str]]) -> dict[str, str]:
    """The differences by class."""
    found: dict[str, Any] = {}
    for module, name in names:
        try:
            compare(module, name)
        except Exception as error:  # noqa: BLE001
            found[f"{module}.{name}"] = f"{type(error).__name__}: {error}"
    return found


def compare(module: str, name: str) -> None:
    expected = run(made(module, name))
    layer = torch.nn.ModuleDict({"experts": made(module, name)})
    (found,) = find_experts(layer, ExpertParallel(enabled=True))
    assert found.n_experts == N_EXPERTS
    as_routed(found.module, found.weights, found.activation, found.n_experts, 1, found.name)
    assert isinstance(layer["experts"], RoutedExperts)
    got = run(layer["experts"])
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_all_classes_of_experts_give_their_own_outputs_and_gradients() -> None:
    names = classes()
    assert len(names) >= LEAST_CLASSES
    assert on_ranks(1, compare_body, names) == [{}]
