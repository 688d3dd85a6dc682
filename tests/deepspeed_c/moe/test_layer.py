"""The layer (deepspeed_c/moe/layer.py, experts.py) on one rank against every expert in plain torch in float64: outputs,
losses and all gradients.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from deepspeed_c.compat import checkpointing
from deepspeed_c.errors import ConfigError, ModelError, RoutingError, StateError
from deepspeed_c.moe.experts import Experts
from deepspeed_c.moe.layer import MoE, MOELayer
from tests.deepspeed_c.moe import moe_oracle as oracle
from tests.toys import Mlp

HIDDEN = 8


class MlpWithBias(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.down.bias


def make(num_experts: int = 5, k: int = 2, **options) -> MoE:
    """A layer whose experts differ, and whose choices are not drawn."""
    torch.manual_seed(1)
    options = {"min_capacity": 0, "use_rts": False, "top2_2nd_expert_sampling": False, **options}
    layer = MoE(HIDDEN, options.pop("expert", None) or Mlp(HIDDEN, 12), num_experts, k=k, **options)
    with torch.no_grad():
        for i, param in enumerate(layer.deepspeed_moe.experts.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
        layer.deepspeed_moe.gate.wg.weight.mul_(3)
    return layer


def theory(layer: MoE, x: Tensor, used: list[bool] | None = None) -> tuple[MoE, Tensor, Tensor, oracle.Gated]:
    """(a copy of the layer in float64, the input, the output, the gate's results)."""
    gate = layer.deepspeed_moe.gate
    wide, x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    tokens = x.reshape(-1, HIDDEN)
    logits = nn.functional.linear(tokens, wide.deepspeed_moe.gate.wg.weight)
    order = "choice" if gate.k <= 2 else "priority" if gate.drop_tokens else "token"
    capacity = oracle.capacity_of(*logits.shape, gate.capacity_factor * gate.k, gate.min_capacity)
    gated = oracle.gate(logits, gate.k, capacity if gate.drop_tokens else None, order=order, used=used)

    def first(out):
        return out[0] if isinstance(out, tuple) else out

    experts = [lambda row, e=e: first(e(row)) for e in wide.deepspeed_moe.experts.deepspeed_experts]
    out = oracle.mixture(tokens, gated, experts, HIDDEN).view(x.shape)
    if layer.use_residual:
        shares = torch.softmax(wide.coefficient(x), -1)
        out = out * shares[..., :1] + first(wide.mlp(x)) * shares[..., 1:]
    if layer.shared_expert is not None:
        out = out + first(wide.shared_expert(x))
    return wide, x, out, gated


def check(layer: MoE, x: Tensor, used: list[bool] | None = None, tolerance: float = 2e-6) -> None:
    x = x.detach().requires_grad_()
    token = None if used is None else torch.tensor(used).view(x.shape[:-1])
    out, l_aux, counts = layer(x, token)
    wide, wide_x, expected, gated = theory(layer, x, used)
    assert out.dtype == x.dtype and out.shape == x.shape and counts.tolist() == gated.counts, (counts, gated.counts)
    factors = torch.linspace(-1, 1, out.numel()).view(out.shape)
    ((out.float() * factors).sum() + 3 * l_aux + 0.1 * layer.deepspeed_moe.gate.z_loss).backward()
    ((expected * factors.double()).sum() + 3 * gated.l_aux + 0.1 * gated.z_loss).backward()
    results = [("output", out, expected), ("l_aux", l_aux, gated.l_aux), ("gradient of x", x.grad, wide_x.grad)]
    for (name, param), (_, theirs) in zip(layer.named_parameters(), wide.named_parameters(), strict=True):
        assert param.grad is not None, f"{name} has no gradient"
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        results.append((f"gradient of {name}", param.grad, wanted))
    for name, ours, theirs in results:
        # Gradients of the gate are small differences of numbers of the outputs' size.
        scale = max(float(theirs.detach().abs().max()) if theirs.numel() else 0.0, 1.0)
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=tolerance * scale), f"{name}: {ours} not {theirs}"


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drops", [True, False])
def test_layer_is_every_expert_on_its_tokens(k, drops):
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(2))
    used = [t % 4 != 2 for t in range(21)]
    for use_residual, mask in itertools.product([False, True], [None, used]):
        layer = make(k=k, drop_tokens=drops, capacity_factor=0.6, use_residual=use_residual)
        check(layer, x, mask)
    shared = make(
        k=k, drop_tokens=drops, shared_expert=MlpWithBias(HIDDEN, 12), expert=MlpWithBias(HIDDEN, 12), use_residual=True
    )
    check(shared, x, used)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_layer_in_bfloat16(k):
    """The gate computes in float32, so that choices are those of float64. Rows and gradients carry 8 bits."""
    x = torch.randn(21, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    for drops, use_residual in itertools.product([False, True], repeat=2):
        layer = make(k=k, drop_tokens=drops, use_residual=use_residual).bfloat16()
        check(layer, x, tolerance=0.04)


def test_hard_sizes():
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3))
    check(make(1, 1, drop_tokens=False), x)
    check(make(5, 2, drop_tokens=False), x[:1])
    check(make(5, 2, drop_tokens=False), x[:0])
    check(make(5, 2, drop_tokens=True), x[:0])
    check(make(5, 2, drop_tokens=False), x, [False] * 9)
    # An expert without tokens gets gradients of zero, so that all ranks reduce and gather the same parameters.
    layer = make(3, 1, drop_tokens=False)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()
    check(layer, x)
    idle = layer.deepspeed_moe.experts.deepspeed_experts[2]
    assert all(param.grad is not None and not param.grad.any() for param in idle.parameters())


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_short_batch_has_fewer_tokens_than_min_capacity(k, is_training):
    for n_tokens in (1, 3):
        layer = make(k=k, min_capacity=4).train(is_training)
        check(layer, torch.randn(n_tokens, 1, HIDDEN))


def test_layer_under_autocast_computes_the_gate_in_float32():
    layer, x = make(k=2, drop_tokens=False), torch.randn(40, HIDDEN)
    out, l_aux, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        half, half_aux, _ = layer(x)
    assert torch.equal(l_aux, half_aux) and half.dtype == torch.bfloat16
    assert not torch.equal(out, half.float()) and torch.allclose(out, half.float(), atol=0.05)
    half.float().sum().backward()
    assert all(param.grad is not None for param in layer.deepspeed_moe.experts.parameters())


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("way", ["torch", "torch reentrant", "ours"])
def test_recomputation_draws_and_computes_the_same_bits(k, way):
    options = {"use_rts": True, "top2_2nd_expert_sampling": True, "noisy_gate_policy": "Jitter"}
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(4))
    results = []
    for recomputes in (False, True):
        layer = make(k=k, capacity_factor=0.5, **options)
        mine = x.clone().requires_grad_()
        torch.manual_seed(9)
        if not recomputes:
            out, l_aux, _ = layer(mine)
        elif way == "ours":
            out, l_aux, _ = checkpointing.checkpoint(layer, mine)
        else:
            out, l_aux, _ = torch.utils.checkpoint.checkpoint(layer, mine, use_reentrant=way == "torch reentrant")
        last = torch.rand(1)
        (out.square().sum() + l_aux).backward()
        results.append([out, l_aux, mine.grad, last, *(param.grad for param in layer.parameters())])
    for i, (plain, again) in enumerate(zip(*results, strict=True)):
        assert torch.equal(plain, again), f"result {i}: {plain} without, {again} with recomputation"


def test_replayed_routes_give_the_same_output():
    layer, x = make(k=2, top2_2nd_expert_sampling=True), torch.randn(4, 5, HIDDEN)
    out, l_aux, counts = layer(x)
    chosen = layer.deepspeed_moe.gate.last_indices
    again = layer(x, indices=chosen)
    assert all(torch.equal(a, b) for a, b in zip((out, l_aux, counts), again))
    other = layer(x, indices=(chosen + 1) % 5)
    assert not torch.equal(other[0], out) and other[2].tolist() == counts.roll(1).tolist()


def test_names_and_marks_are_those_of_deepspeed():
    layer = make(4, 2, use_residual=True)
    experts = [f"deepspeed_moe.experts.deepspeed_experts.{i}" for i in range(4)]
    parts = [f"{where}.{name}" for where in [*experts, "mlp"] for name in ("up", "down")]
    wanted = {f"{part}.{kind}" for part in [*parts, "coefficient"] for kind in ("weight", "bias")}
    assert set(layer.state_dict()) == wanted | {"deepspeed_moe.gate.wg.weight"}
    for name, param in layer.named_parameters():
        is_expert = ".experts." in name
        assert getattr(param, "allreduce", True) is not is_expert, name
        assert getattr(param, "group_name", None) == ("ep_size_1" if is_expert else None), name
    moe = layer.deepspeed_moe
    assert (layer.num_local_experts, moe.experts.num_local_experts, moe.experts.first_expert) == (4, 4, 0)
    assert isinstance(moe, MOELayer) and layer.expert_group_name == moe.ep_group_name == "ep_size_1"


def test_experts_take_equal_parts_as_in_deepspeed():
    experts = Experts(Mlp(HIDDEN, 12), 3, "ep_size_1")
    for i, param in enumerate(experts.parameters()):
        nn.init.normal_(param, generator=torch.Generator().manual_seed(i))
    x = torch.randn(2, 3, 4, HIDDEN)
    wanted = torch.stack([expert(x[:, i]) for i, expert in enumerate(experts.deepspeed_experts)], 1)
    assert torch.allclose(experts(x), wanted, atol=1e-6)


def test_layer_is_copied_and_pickled_after_a_forward():
    layer, x = make(), torch.randn(6, HIDDEN)
    out, _, _ = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.deepspeed_moe.l_aux is None and torch.equal(other(x)[0], out)


class Shorter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[1:]


def test_errors_name_what_and_where():
    for num_experts, ep_size in ((4, 3), (3, 0)):
        with pytest.raises(ConfigError, match=rf"{num_experts} experts cannot be divided among ep_size = {ep_size}"):
            MoE(HIDDEN, Mlp(HIDDEN, 12), num_experts, ep_size=ep_size)
    with pytest.raises(ConfigError, match="k is 3, and there are 2 experts"):
        MoE(HIDDEN, Mlp(HIDDEN, 12), 2, k=3)
    with pytest.raises(ConfigError, match="noisy_gate_policy is 'Noise'"):
        MoE(HIDDEN, Mlp(HIDDEN, 12), 2, noisy_gate_policy="Noise")
    layer = MoE(HIDDEN, Mlp(HIDDEN, 12), 4, ep_size=2)
    with pytest.raises(StateError, match="on 2 ranks, and the layer does not have them yet"):
        layer(torch.randn(4, HIDDEN))
    layer = make(3, 1, drop_tokens=True)
    layer.deepspeed_moe.rename("block.2")
    with pytest.raises(RoutingError, match=r"block\.2: the logit of token 1"):
        layer(torch.full((4, HIDDEN), 1.0).index_fill_(0, torch.tensor(1), float("nan")))
    layer = make(1, 1, expert=Shorter())
    with pytest.raises(ModelError, match=r"expert 0 returned \(4, 8\) for \(5, 8\)"):
        layer(torch.randn(5, HIDDEN))


def test_options_that_change_nothing_give_the_same_layer():
    x = torch.randn(6, HIDDEN)
    plain = make()(x)
    other = make(use_tutel=True, enable_expert_tensor_parallelism=True)(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, other))
