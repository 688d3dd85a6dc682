"""Experts over ranks (deepspeed_c/moe/dispatch.py) against one process that has all experts: outputs, gradients, and
what is sent.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.compat import checkpointing
from deepspeed_c.errors import BackwardError, ConfigError, DeepSpeedCError
from deepspeed_c.moe.dispatch import _orders
from deepspeed_c.moe.layer import MoE
from deepspeed_c.recompute.operators import Measurement
from deepspeed_c.utils import groups
from tests.deepspeed_c.moe.test_layer import HIDDEN, make
from tests.ranks import on_ranks, run_ranks

N_EXPERTS = 8
COUNTS = "counts of tokens to experts of MoE"
WAYS = [
    "tokens to experts of MoE",
    "tokens from experts of MoE",
    "gradients to experts of MoE",
    "gradients from experts of MoE",
]


def tokens_of(case: str, world: int, dtype: torch.dtype) -> list[Tensor]:
    """The tokens of each rank."""
    generator = torch.Generator().manual_seed(6)
    sizes = {"even": [12] * world, "uneven": [3 + 5 * rank for rank in range(world)]}.get(case, [7] * world)
    if case == "one rank has none":
        sizes[world - 1] = 0
    if case == "none":
        sizes = [0] * world
    made = [torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in sizes]
    if case == "all to one expert":
        made = [x[:1].expand_as(x).clone() * 0 + 1 for x in made]
    return made


def over_ranks(whole: MoE, world: int, rank: int, transport: str = "off") -> MoE:
    """The layer of one rank, with its part of the experts of ``whole``."""
    layer = copy.deepcopy(whole)
    moe, n_local = layer.deepspeed_moe, N_EXPERTS // world
    layer.ep_size = moe.ep_size = world
    layer.num_local_experts = moe.num_local_experts = moe.experts.num_local_experts = n_local
    moe.experts.deepspeed_experts = moe.experts.deepspeed_experts[rank * n_local : (rank + 1) * n_local]
    ep = Collectives()
    ep.use_shared_memory(transport)
    moe.connect(ep)
    return layer


def pass_of(layer: MoE, x: Tensor, *, recomputes: bool = False) -> dict[str, Tensor]:
    """Outputs and gradients of one pass. The loss tells tokens and columns apart."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    out, l_aux, counts = checkpointing.checkpoint(layer, x) if recomputes else layer(x)
    factors = torch.linspace(-1, 1, HIDDEN).to(x.dtype)
    ((out * factors).float().square().sum() + l_aux).backward()
    first = layer.deepspeed_moe.experts.first_expert
    found = {"output": out.detach(), "l_aux": l_aux.detach(), "counts": counts, "gradient of x": x.grad}
    for name, param in layer.named_parameters():
        if ".deepspeed_experts." in name:
            before, _, after = name.partition(".deepspeed_experts.")
            number, _, rest = after.partition(".")
            name = f"{before}.{int(number) + first}.{rest}"
        assert param.grad is not None, name
        found[name] = param.grad
    return found


def exchange(rank: int, world: int, cases: list[tuple[str, int, bool, torch.dtype]], transport: str) -> list[Any]:
    results = []
    for case, k, drops, dtype in cases:
        whole = make(N_EXPERTS, k, drop_tokens=drops, capacity_factor=0.6).to(dtype)
        layer = over_ranks(whole, world, rank, transport)
        assert layer.deepspeed_moe.experts.first_expert == rank * N_EXPERTS // world
        results.append(pass_of(layer, tokens_of(case, world, dtype)[rank]))
    return results


@pytest.mark.parametrize("transport", ["off", "auto"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_one_process_does(world, transport):
    cases = [
        *((case, 2, False, torch.float32) for case in ("uneven", "one rank has none", "none", "all to one expert")),
        *itertools.product(["even"], [1, 2, 3], [True, False], [torch.float32]),
        ("uneven", 2, False, torch.bfloat16),
    ]
    by_rank = run_ranks(world, exchange, cases, transport)
    for i, (case, k, drops, dtype) in enumerate(cases):
        tolerance = 5e-6 if dtype == torch.float32 else 0.05
        whole = make(N_EXPERTS, k, drop_tokens=drops, capacity_factor=0.6).to(dtype)
        parts = [pass_of(copy.deepcopy(whole), x) for x in tokens_of(case, world, dtype)]
        for rank in range(world):
            found = by_rank[rank][i]
            for name, value in found.items():
                # An expert's gradient comes from the tokens of all ranks.
                is_expert = ".experts." in name
                wanted = sum(part[name].float() for part in parts) if is_expert else parts[rank][name].float()
                scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1.0)
                assert torch.allclose(value.float(), wanted, rtol=0, atol=tolerance * scale), (
                    f"{case}, k {k}, drops {drops}, {dtype}, rank {rank}, {name}: {value} not {wanted}"
                )
        names = {name for rank in range(world) for name in by_rank[rank][i]}
        assert names == set(parts[0]), names ^ set(parts[0])


def sent(rank: int, world: int, k: int) -> tuple[list[tuple[str, str, int]], list[int]]:
    layer = over_ranks(make(N_EXPERTS, k, drop_tokens=False), world, rank)
    ledger = layer.deepspeed_moe._ranks.ledger
    begin = ledger.last
    pass_of(layer, tokens_of("even", world, torch.float32)[rank])
    counts = layer.deepspeed_moe.exp_counts.view(world, -1).sum(1).tolist()
    return [(entry.op, entry.label, entry.n_bytes) for entry in ledger.recent(ledger.last - begin)], counts


@pytest.mark.parametrize("k", [1, 2, 3])
def test_ledger_has_each_way_with_exact_rows(k):
    found = run_ranks(2, sent, k)
    for rank, (entries, counts) in enumerate(found):
        row = 4 * HIDDEN
        n_out, n_in = sum(counts), sum(other[rank] for _, other in found)
        wanted = [(COUNTS, 8 * N_EXPERTS), *zip(WAYS, [n_out * row, n_in * row, n_out * row, n_in * row], strict=True)]
        assert [entry[1:] for entry in entries] == wanted, (rank, entries, wanted)
        assert {entry[0] for entry in entries} == {"all-to-all"} and n_out == 12 * k


def sent_again(rank: int, world: int) -> list[list[tuple[str, int]]]:
    found = []
    for recomputes in (False, True):
        layer = over_ranks(make(N_EXPERTS, 2, drop_tokens=False), world, rank)
        ledger = layer.deepspeed_moe._ranks.ledger
        begin = ledger.last
        pass_of(layer, tokens_of("uneven", world, torch.float32)[rank], recomputes=recomputes)
        found.append([(entry.label, entry.n_bytes) for entry in ledger.recent(ledger.last - begin)])
    return found


def test_recomputation_does_not_repeat_the_exchange():
    for rank, (plain, again) in enumerate(run_ranks(2, sent_again)):
        assert plain == again and len(plain) == 5, (rank, plain, again)


def recomputed(rank: int, world: int) -> list[dict[str, Tensor]]:
    x = tokens_of("uneven", world, torch.float32)[rank]
    options = {"drop_tokens": True, "capacity_factor": 0.5, "use_rts": True, "noisy_gate_policy": "Jitter"}
    whole = make(N_EXPERTS, 1, **options)
    return [pass_of(over_ranks(whole, world, rank), x, recomputes=recomputes) for recomputes in (False, True)]


def test_recomputation_gives_the_same_bits():
    for rank, (plain, again) in enumerate(run_ranks(2, recomputed)):
        for name, value in plain.items():
            assert torch.equal(value, again[name]), f"rank {rank}, {name}: {value} without, {again[name]} with"


def measured(rank: int, world: int) -> list[bool]:
    found = []
    for layer in (make(N_EXPERTS, 2), over_ranks(make(N_EXPERTS, 2), world, rank)):
        x = torch.randn(8, HIDDEN, requires_grad=True)
        measurement = Measurement("layer", layer, [x], set())
        with measurement:
            layer(x)
        found.append(measurement.done().sends)
    return found


def test_a_budget_knows_that_the_layer_sends():
    """A rank that kept the layer, while another runs it again, would leave the other waiting for an exchange."""
    assert run_ranks(2, measured) == [[False, True]] * 2


def failing(rank: int, world: int) -> str:
    layer = over_ranks(make(N_EXPERTS, 2, drop_tokens=False), world, rank)
    x = tokens_of("even", world, torch.float32)[rank]
    if rank == 1:
        x = x.index_fill(0, torch.tensor(3), float("nan"))
    try:
        layer(x)
    except DeepSpeedCError as error:
        first = f"{type(error).__name__}: {error.args[0]}"
    # The ranks are still in step.
    layer(tokens_of("even", world, torch.float32)[rank])
    return first


def test_an_error_of_one_rank_is_one_of_all():
    first, second = run_ranks(2, failing)
    assert first.startswith("RoutingError: MoE, rank 0: rank 1 has raised an error"), first
    assert "the logit of token 3" in second and "on rank 1" in second, second


@on_ranks(2)
def test_a_rank_may_have_fewer_tokens_than_min_capacity(rank: int, world: int) -> None:
    """Rank 1 has fewer tokens than min_capacity, and nothing is dropped: as with places for all."""
    found = []
    for drops in (True, False):
        whole = make(N_EXPERTS, 2, drop_tokens=drops, min_capacity=5, capacity_factor=float(N_EXPERTS))
        layer = over_ranks(whole, world, rank)
        out, _, counts = layer(tokens_of("even", world, torch.float32)[rank][: 2 if rank == 1 else None])
        found.append((out, counts))
    (with_places, counts), (without, all_counts) = found
    assert torch.equal(with_places, without) and torch.equal(counts, all_counts), found


def without_engine(rank: int, world: int) -> list[Any]:
    found = []
    for ep_size, is_strided in ((1, False), (2, False), (2, True), (4, False)):
        torch.manual_seed(0)
        groups.set_mesh(None)
        layer = MoE(HIDDEN, torch.nn.Linear(HIDDEN, HIDDEN), 4, ep_size=ep_size, drop_tokens=False)
        layer.set_deepspeed_parallelism(is_strided)
        out, _, _ = layer(torch.randn(5, HIDDEN))
        out.sum().backward()
        moe = layer.deepspeed_moe
        ranks = [rank] if ep_size == 1 else dist.get_process_group_ranks(moe.ep_group)
        found.append((ranks, moe.experts.first_expert, moe.gate.data_rank))
    layer = MoE(HIDDEN, torch.nn.Linear(HIDDEN, HIDDEN), 6, ep_size=3)
    for error in (lambda: layer.set_deepspeed_parallelism(), lambda: layer.deepspeed_moe.connect(Collectives())):
        try:
            error()
        except ConfigError as raised:
            found.append(str(raised))
    return found


def test_layers_get_ranks_without_an_engine():
    found = run_ranks(4, without_engine)
    for rank in range(4):
        near, far = [0, 1] if rank < 2 else [2, 3], [0, 2] if rank % 2 == 0 else [1, 3]
        wanted = [([rank], 0, rank)]
        wanted += [(ranks, 2 * ranks.index(rank), rank) for ranks in (near, far)]
        wanted.append(([0, 1, 2, 3], rank, rank))
        assert found[rank][:4] == wanted, (rank, found[rank], wanted)
        assert "experts cannot be spread over 3 of the 4 ranks" in found[rank][4]
        assert "ep_size is 3, and there are 4 ranks" in found[rank][5]


def second_derivative(rank: int, world: int) -> bool:
    layer = over_ranks(make(N_EXPERTS, 1, drop_tokens=False), world, rank)
    x = torch.randn(4, HIDDEN, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    try:
        grad.square().sum().backward()
    except BackwardError as error:
        return "second derivative" in str(error)
    return False


def test_second_derivative_is_refused():
    assert run_ranks(2, second_derivative) == [True, True]


def test_order_by_expert_is_brute_force():
    generator = torch.Generator().manual_seed(0)
    for n_ranks, n_experts in ((1, 2), (2, 3), (5, 4)):
        for _ in range(20):
            rows = torch.randint(0, 4, (n_ranks, n_experts), generator=generator).tolist()
            owners = [(e, r) for r in range(n_ranks) for e in range(n_experts) for _ in range(rows[r][e])]
            wanted = sorted(range(len(owners)), key=lambda i: (owners[i], i))
            order, inverse = _orders(rows, torch.device("cpu"))
            assert order.tolist() == wanted, (rows, order, wanted)
            assert torch.equal(order[inverse], torch.arange(len(owners)))
    assert _orders([[3], [4]], torch.device("cpu")) == (None, None)
