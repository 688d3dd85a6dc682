"""Gates (deepspeed_c/moe/gate.py) against float64 loops over tokens and experts, and against DeepSpeed's own.

If DSC_PEER_PYTHON names a Python that has DeepSpeed, its gates run on the same logits.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_c.comm.ledger import ledger_of
from deepspeed_c.errors import ConfigError, ModelError, RoutingError
from deepspeed_c.moe.gate import Draws, Routes, TopKGate, gumbel_rsample, top1gating, top2gating, topkgating
from tests.deepspeed_c.moe import moe_oracle as oracle
from tests.ranks import run_ranks

PEER = os.environ.get("DSC_PEER_PYTHON", "")
SCRIPT = Path(__file__).with_name("peer_gates.py")


def logits_of(n_tokens: int, n_experts: int, seed: int = 0) -> Tensor:
    return (torch.randn(n_tokens, n_experts, generator=torch.Generator().manual_seed(seed)) * 2).requires_grad_()


def gating(k: int, logits: Tensor, factor: float, *, drops: bool, policy: str = "probs", **more) -> Routes:
    if k == 1:
        return top1gating(logits, factor, 2, None, None, drops, False, None, True, **more)
    if k == 2:
        return top2gating(logits, factor, 2, drops, None, False, True, **more)
    return topkgating(logits, k, factor, 2, drops, None, policy, True, **more)


def expected(k: int, logits: Tensor, factor: float, *, drops: bool, policy: str = "probs", **more) -> oracle.Gated:
    order = "choice" if k <= 2 else "priority" if drops and policy == "probs" else "token"
    capacity = oracle.capacity_of(*logits.shape, factor * k, 2) if drops else None
    return oracle.gate(logits, k, capacity, order=order, **more)


def compare(found: Routes, theory: oracle.Gated, logits: Tensor, wide: Tensor) -> None:
    assert int(found.capacity) == theory.capacity, (found.capacity, theory.capacity)
    assert found.num_experts == logits.shape[1] and found.indices.dtype == torch.int32
    for name, ours, theirs in (
        ("indices", found.indices.t().tolist(), theory.kept),
        ("locations", found.locations.t().tolist(), theory.locations),
        ("counts", found.exp_counts.tolist(), theory.counts),
    ):
        assert ours == theirs, f"{name}: {ours} here, {theirs} in the oracle"
    weights = oracle.as_table(theory.weights)
    assert torch.allclose(found.gates.t().double(), weights, atol=1e-6), (found.gates.t(), weights)
    assert abs(found.l_aux.item() - theory.l_aux.item()) < 1e-6, (found.l_aux, theory.l_aux)
    # A gradient through both results, with weights that tell the slots apart
    factors = torch.linspace(1, 2, found.gates.numel()).view(found.gates.t().shape)
    (mine,) = torch.autograd.grad((found.gates.t() * factors).sum() + 3 * found.l_aux, logits)
    (theirs,) = torch.autograd.grad((weights * factors.double()).sum() + 3 * theory.l_aux, wide)
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    assert torch.allclose(mine.double(), theirs, atol=2e-6 * max(scale, 1.0)), (mine, theirs)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("n_tokens", "n_experts"), [(37, 8), (16, 3), (7, 13)])
def test_gates_are_those_of_the_papers(k, drops, policy, n_tokens, n_experts):
    logits = logits_of(n_tokens, n_experts)
    wide = logits.detach().double().requires_grad_()
    for factor in (0.3, 1.0, 4.0):
        found = gating(k, logits, factor, drops=drops, policy=policy)
        compare(found, expected(k, wide, factor, drops=drops, policy=policy), logits, wide)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_unused_tokens_take_no_place_and_no_part_in_the_loss(k):
    logits = logits_of(29, 5)
    wide = logits.detach().double().requires_grad_()
    used = [t % 3 != 1 for t in range(29)]
    token = torch.tensor(used).float().view(1, 29)
    for drops in (True, False):
        found = gating(k, logits, 0.7, drops=drops, used_token=token) if k > 1 else None
        if k == 1:
            found = top1gating(logits, 0.7, 2, token, None, drops, False, None, True)
        compare(found, expected(k, wide, 0.7, drops=drops, used=used), logits, wide)
        assert (found.indices[:, ~torch.tensor(used)] == -1).all()
    none = top1gating(logits, 1.0, 2, torch.zeros(29), None, True, False, None, True)
    assert float(none.l_aux) == 0 and none.exp_counts.sum() == 0 and (none.gates == 0).all()


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("n_tokens", [0, 1, 3])
def test_fewer_tokens_than_min_capacity_are_all_taken(n_tokens, k, policy):
    """The places are those of ``min_capacity``: code that makes buffers from it gets their shape."""
    logits = logits_of(n_tokens, 5)
    wide = logits.detach().double().requires_grad_()
    if k == 1:
        ways = [lambda **sparse: top1gating(logits, 1.0, 4, use_rts=policy == "probs", **sparse)]
        order = "token"
    elif k == 2:
        ways = [lambda **sparse: top2gating(logits, 1.0, 4, top2_2nd_expert_sampling=False, **sparse)]
        order = "choice"
    else:
        ways, order = [lambda **sparse: topkgating(logits, 3, 1.0, 4, drop_policy=policy, **sparse)], "token"
    if k < 3:
        ways.append(lambda **sparse: topkgating(logits, k, 1.0, 4, drop_policy=policy, **sparse))
    for i, way in enumerate(ways):
        if i == 1 and k == 2:
            order = "token"  # of topkgating, whose loss is about both choices
        found = way(sparse_routes=True)
        gated = oracle.gate(wide, k, 4, order=order)
        print(found.capacity, found.indices, gated.kept)
        assert int(found.capacity) == 4 and found.indices.t().tolist() == gated.kept
        assert found.locations.t().tolist() == gated.locations and (found.indices >= 0).all()
        _, combine, mask, counts = way()
        assert combine.shape == mask.shape == (n_tokens, 5, 4) and mask.sum() == counts.sum() == n_tokens * k


@pytest.mark.parametrize("k", [1, 2, 3])
def test_dense_results_hold_the_sparse_ones(k):
    logits = logits_of(23, 5)
    for drops in (True, False):
        sparse = gating(k, logits, 0.6, drops=drops)
        if k == 1:
            dense = top1gating(logits, 0.6, 2, None, None, drops, False)
        else:
            dense = top2gating(logits, 0.6, 2, drops, None, False) if k == 2 else topkgating(logits, k, 0.6, 2, drops)
        table = np.zeros((23, 5, int(sparse.capacity)))
        for j in range(k):
            for t in range(23):
                if sparse.indices[j, t] >= 0:
                    table[t, sparse.indices[j, t], sparse.locations[j, t]] = float(sparse.gates[j, t])
        l_aux, combine, mask, counts = dense
        assert np.array_equal(combine.detach().numpy(), table.astype(np.float32)), (combine, table)
        assert np.array_equal(mask.numpy(), table > 0) and mask.dtype == torch.bool
        assert float(l_aux) == float(sparse.l_aux) and counts.tolist() == sparse.exp_counts.tolist()
        (grad,) = torch.autograd.grad(combine.square().sum(), logits)
        (of_sparse,) = torch.autograd.grad(gating(k, logits, 0.6, drops=drops).gates.square().sum(), logits)
        assert torch.allclose(grad, of_sparse, atol=1e-7), (grad, of_sparse)


def test_hard_sizes():
    for k in (1, 2, 3):
        none = gating(k, torch.zeros(0, 4), 1.0, drops=False)
        assert none.indices.shape == none.gates.shape == (k, 0) and float(none.l_aux) == 0
        assert none.exp_counts.tolist() == [0] * 4 and int(none.capacity) == 0
        assert topkgating(torch.zeros(0, 4), k, 1.0, 0, False)[1].shape == (0, 4, 0)
    one = gating(1, torch.zeros(3, 1), 1.0, drops=True)
    assert one.indices.tolist() == [[0, 0, 0]] and one.gates.tolist() == [[1.0] * 3] and float(one.l_aux) == 1
    # Equal logits go to the lower experts, and an expert may be shut out by a logit of -inf.
    assert gating(2, torch.zeros(1, 4), 1.0, drops=False).indices.tolist() == [[0], [1]]
    shut = gating(2, torch.tensor([[float("-inf"), 1.0, 2.0]]), 1.0, drops=False)
    assert shut.indices.tolist() == [[2], [1]], shut
    large = gating(1, torch.tensor([[3e38, -3e38]]), 1.0, drops=False)
    assert large.gates.tolist() == [[1.0]] and float(large.l_aux) == 2


def test_capacity_is_rounded_in_float32_as_in_deepspeed():
    for n_tokens, n_experts, factor in [(10, 1, 1.1), (100, 10, 1.1), (7, 3, 1.25), (64, 8, 1.0)]:
        found = gating(1, torch.zeros(n_tokens, n_experts), factor, drops=True)
        assert int(found.capacity) == oracle.capacity_of(n_tokens, n_experts, factor, 2)
    assert int(gating(1, torch.zeros(10, 1), 1.1, drops=True).capacity) == 11


def test_random_selection_keeps_as_many_tokens_and_favours_none():
    logits = torch.zeros(40, 2)
    logits[:, 0] = 5.0
    times_kept = torch.zeros(40)
    torch.manual_seed(5)
    for _ in range(400):
        found = top1gating(logits, 0.5, 2, None, None, True, True, None, True)
        kept = found.indices[0] == 0
        assert kept.sum() == int(found.capacity) == 10 and found.exp_counts.tolist() == [40, 0]
        assert sorted(found.locations[0][kept].tolist()) == list(range(10))
        assert found.locations[0][kept].tolist() == sorted(found.locations[0][kept].tolist())
        times_kept += kept
    # 400 draws with probability 1/4: 100 +- 8.7
    assert times_kept.min() > 60 and times_kept.max() < 145, times_kept


def test_noise_is_gumbel_and_leaves_logits_as_they_are():
    """With Gumbel noise the largest logit is drawn with the probability of its softmax."""
    row = torch.tensor([1.0, 0.0, -1.0, 2.0])
    logits = row.repeat(20000, 1)
    before = logits.clone()
    torch.manual_seed(0)
    probabilities = torch.softmax(row.double(), 0)
    found = top1gating(logits, 1.0, 0, None, "RSample", False, False, None, True)
    share = found.exp_counts / 20000
    assert torch.allclose(share.double(), probabilities, atol=0.012), (share, probabilities)
    assert torch.allclose(found.gates[0].double(), probabilities[found.indices[0].long()], atol=1e-6)
    second = top2gating(logits, 1.0, 0, False, None, True, True)
    assert (second.indices[0] == 3).all() and (second.indices[1] != 3).all()
    share = torch.bincount(second.indices[1], minlength=4) / 20000
    theory = probabilities.clone()
    theory[3] = 0
    assert torch.allclose(share.double(), theory / theory.sum(), atol=0.012), (share, theory / theory.sum())
    assert torch.equal(logits, before)


def test_draws_follow_the_generator_and_the_rank():
    gate = TopKGate(8, 4, 1, noisy_gate_policy="Jitter", min_capacity=1)
    x = torch.randn(12, 8)
    torch.manual_seed(3)
    first, state = gate(x, None, True), torch.get_rng_state()
    second = gate(x, None, True)
    torch.manual_seed(3)
    again = gate(x, None, True)
    assert all(torch.equal(a, b) for a, b in zip((*first[3:], first.l_aux), (*again[3:], again.l_aux)))
    assert torch.equal(torch.get_rng_state(), state), "a forward draws one seed"
    assert not torch.equal(first.gates, second.gates)
    gate.eval()
    assert torch.equal(gate(x, None, True).l_aux, gate(x, None, True).l_aux)
    # Two ranks draw what one process draws for both halves.
    torch.manual_seed(7)
    whole = Draws().gumbel((6, 5), x.device)
    halves = []
    for rank in range(2):
        torch.manual_seed(7)
        halves.append(Draws(rank).gumbel((3, 5), x.device))
    assert torch.equal(torch.cat(halves), whole), (halves, whole)
    drawn = Draws().jitter(torch.ones(20000))
    assert drawn.min() >= 0.99 and drawn.max() <= 1.01 and abs(float(drawn.mean()) - 1) < 2e-4
    assert abs(float(drawn.std()) - 0.02 / math.sqrt(12)) < 2e-4


@pytest.mark.parametrize("k", [1, 2, 3])
def test_replayed_indices_are_used_and_the_last_ones_can_be_read(k):
    torch.manual_seed(0)
    gate = TopKGate(8, 6, k, capacity_factor=0.7, min_capacity=1, use_rts=False)
    x, used = torch.randn(20, 8), torch.arange(20) % 4 != 0
    assert gate.last_indices is None and float(gate.z_loss) == 0
    first = gate(x, used, True)
    chosen = gate.last_indices.clone()
    assert chosen.shape == (20, k) and (chosen[~used] == -1).all() and (chosen[used] >= 0).all()
    again = gate(x, used, True, indices=chosen)
    assert all(torch.equal(a, b) for a, b in zip(first[3:], again[3:])) and torch.equal(first.l_aux, again.l_aux)
    # Other experts than the gate's own: weights and losses are those of the given ones.
    given = torch.stack([(torch.arange(20) + j) % 6 for j in range(k)], 1)
    found = gate(x, None, True, indices=given)
    wide = torch.nn.functional.linear(x.double(), gate.wg.weight.detach().double()).requires_grad_()
    logits = torch.nn.functional.linear(x, gate.wg.weight)
    order = "choice" if k <= 2 else "priority"
    capacity = oracle.capacity_of(20, 6, 0.7 * k, 1)
    theory = oracle.gate(wide, k, capacity, order=order, chosen=given.tolist())
    assert found.indices.t().tolist() == theory.kept and abs(float(found.l_aux) - float(theory.l_aux)) < 1e-6
    assert torch.allclose(found.gates.t().double(), oracle.as_table(theory.weights), atol=1e-5)
    assert abs(float(gate.z_loss) - float(theory.z_loss)) < 1e-5 * float(theory.z_loss)
    assert torch.equal(gate.last_indices, given.int()) and logits.shape == (20, 6)
    for wrong in (given[:5], given.float(), given + 6, given - 2, given + 2**32, given[:, :1].repeat(1, k + 1)):
        with pytest.raises(ModelError, match="indices"):
            gate(x, None, True, indices=wrong)
    if k > 1:
        with pytest.raises(ModelError, match="token 0 are"):
            gate(x, None, True, indices=given[:, :1].repeat(1, k))


def test_z_loss_and_its_gradient():
    torch.manual_seed(1)
    gate = TopKGate(8, 6, 2, min_capacity=1)
    x, used = torch.randn(11, 8), torch.arange(11) % 2 == 0
    for token in (None, used):
        gate(x, token, True)
        weight = gate.wg.weight.detach().double().requires_grad_()
        logits = x.double() @ weight.t()
        theory = torch.log(torch.exp(logits).sum(1)).square()
        theory = theory.mean() if token is None else theory[used].mean()
        (mine,), (theirs,) = torch.autograd.grad(gate.z_loss, gate.wg.weight), torch.autograd.grad(theory, weight)
        assert abs(float(gate.z_loss) - float(theory)) < 1e-5 and torch.allclose(mine.double(), theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_is_float32_in_16_bit_models_and_under_autocast(dtype):
    torch.manual_seed(0)
    gate = TopKGate(64, 8, 2, min_capacity=1, top2_2nd_expert_sampling=False).to(dtype)
    x = torch.randn(50, 64).to(dtype)
    theory = torch.nn.functional.linear(x.double(), gate.wg.weight.double())
    gate(x, None, True)
    assert gate._last[0].dtype == torch.float32 and torch.allclose(gate._last[0].double(), theory, atol=1e-5)
    gate.float()
    with torch.autocast("cpu", torch.bfloat16):
        gate(x.float(), None, True)
    assert torch.allclose(gate._last[0].double(), theory, atol=1e-5)


def test_gate_follows_training_mode_and_its_own_settings():
    torch.manual_seed(0)
    gate = TopKGate(8, 4, 1, 0.5, 2.0, 1, "RSample", True, False)
    x = torch.randn(16, 8)
    logits = gate.wg(x).detach()
    assert int(gate(x, None, True).capacity) == 2
    assert not torch.equal(gate.last_indices[:, 0], logits.argmax(1))
    gate.eval()
    assert int(gate(x, None, True).capacity) == 8
    assert torch.equal(gate.last_indices[:, 0].long(), logits.argmax(1))
    three = TopKGate(8, 4, 3, 0.5, min_capacity=1, drop_policy="position")
    logits = three.wg(x).detach()
    found = three(x, None, True)
    assert found.indices.tolist() == topkgating(logits, 3, 0.5, 1, True, None, "position", True).indices.tolist()
    assert found.indices.tolist() != topkgating(logits, 3, 0.5, 1, True, None, "probs", True).indices.tolist()
    again = [copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))]
    assert all(each.last_indices is None and torch.equal(each.wg.weight, gate.wg.weight) for each in again)
    assert list(gate.state_dict()) == ["wg.weight"] and isinstance(gate.wg, torch.nn.Linear)


def test_errors_name_what_and_where():
    for k in (0, 5):
        with pytest.raises(ConfigError, match=rf"k is {k}, and there are 4 experts"):
            TopKGate(8, 4, k)
        with pytest.raises(ConfigError, match="4 experts"):
            topkgating(torch.zeros(8, 4), k, 1.0, 1)
    with pytest.raises(ConfigError, match="noisy_gate_policy is 'jitter'"):
        TopKGate(8, 4, noisy_gate_policy="jitter")
    with pytest.raises(ConfigError, match="drop_policy is 'last'"):
        TopKGate(8, 4, 3, drop_policy="last")
    gate = TopKGate(8, 4, 1, min_capacity=5)
    gate.rename("layers.3.moe")
    x = torch.randn(6, 8)
    for value in (float("nan"), float("inf")):
        x[4, 2] = value
        state = torch.get_rng_state()
        with pytest.raises(RoutingError, match=r"layers\.3\.moe: the logit of token 4 for expert . is .* on rank 0"):
            gate(x)
        assert torch.equal(torch.get_rng_state(), state)
    logits = torch.randn(6, 4)
    logits[5, 3] = float("inf")
    with pytest.raises(RoutingError, match="token 5 for expert 3 is inf"):
        top1gating(logits, 1.0, 1)
    with pytest.raises(RoutingError, match="token 0 for expert 0 is -inf"):
        top2gating(torch.full((2, 3), float("-inf")), 1.0, 1)
    with pytest.raises(ModelError, match="used_token has 5 elements for 6 tokens"):
        gate(torch.randn(6, 8), torch.ones(5))


def gates_of(python: str, *arguments: str) -> dict:
    done = subprocess.run([python, str(SCRIPT), *arguments], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("GATES ")]
    return json.loads(line.removeprefix("GATES "))


def capacity_body(rank: int, world: int) -> tuple[torch.Size, int]:
    group = dist.group.WORLD
    # Rank 0 sends 5 of its tokens to expert 0, rank 1 sends 3 of its tokens to expert 2.
    chosen = [0, 0, 0, 0, 0, 1, 2] if rank == 0 else [2, 2, 2, 1]
    logits = torch.nn.functional.one_hot(torch.tensor(chosen), 3).float()
    before = ledger_of(group).last
    found = top1gating(logits, 1.0, 1, drop_tokens=False, ep_group=group)
    return found[1].shape, ledger_of(group).last - before


def test_ranks_without_drops_agree_on_the_largest_expert_by_a_recorded_collective():
    by_rank = run_ranks(2, capacity_body)
    assert [shape for shape, _ in by_rank] == [(7, 3, 5), (4, 3, 5)], by_rank
    assert all(n > 0 for _, n in by_rank), "the watchdog would not see this collective"


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_gates_are_those_of_deepspeed():
    theirs, ours = gates_of(PEER), gates_of(sys.executable, "ours")
    assert theirs.keys() == ours.keys() and len(theirs) > 200
    wrong = []
    for name in theirs:
        for i, (a, b) in enumerate(zip(theirs[name], ours[name], strict=True)):
            if np.shape(a) != np.shape(b) or not np.allclose(a, b, rtol=1e-6, atol=1e-6):
                wrong.append(f"{name}, result {i}: {a} in DeepSpeed, {b} here")
    assert not wrong, f"{len(wrong)} of {len(theirs)}:\n" + "\n".join(wrong[:5])


def test_gumbel_noise_has_its_distribution():
    torch.manual_seed(0)
    noise = gumbel_rsample((400, 50), torch.device("cpu")).double()
    # Mean: Euler's constant; variance: pi^2 / 6.
    assert abs(float(noise.mean()) - 0.5772) < 0.03 and abs(float(noise.var()) - math.pi**2 / 6) < 0.06, noise
    assert noise.isfinite().all() and not torch.equal(noise, gumbel_rsample((400, 50), torch.device("cpu")).double())
