"""How much of ring attention's communication hides behind computation, over a link where a hop takes 0.8 of a block?

Four hosts (network namespaces of this machine, links shaped by tc tbf) have one rank each. The causal sequence is in
zigzag order, in bfloat16. Blocks sleep instead of computing, because an accelerator leaves the host idle in the same
way. A block sleeps in proportion to its pairs of queries and keys, and 2.5 times as long in backward. All other work is
real. A block of the forward takes the time of a hop of keys and values, measured alone, divided by 0.8. Compute alone
is the same program, but sends no messages.
Run as root: python -m benchmarks.deepspeed_c.ring_attention [--tokens 8192 --heads 8 --ratio 0.8]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hosts import run_on_hosts
from benchmarks.measure import bound, median_spread, require
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.work import Work
from deepspeed_c.sequence import SequenceCut, plan_ring, ring, ring_attention

HOSTS = (0, 1, 2, 3)
RATE = "1gbit"
WIDTH = 64
WARMUP = 2


class Mute(Collectives):
    """Collectives that send nothing, with the interface of the real ones."""

    def shift(self, sent: torch.Tensor, received: torch.Tensor, distance: int, *, label: str = "") -> Work:
        return Work.done()


class Sleeper:
    """Blocks that sleep instead of computing."""

    def __init__(self) -> None:
        self.seconds = 0.0  # for one query, key and head

    def _sleep(self, q: torch.Tensor, k: torch.Tensor, is_causal: bool, times: float) -> None:
        n = q.shape[2]
        pairs = n * (n + 1) / 2 if is_causal else n * k.shape[2]
        time.sleep(pairs * q.shape[1] * self.seconds * times)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, is_causal: bool = False
    ) -> Any:
        self._sleep(q, k, is_causal, 1.0)
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *rest: Any,
        scale: float,
        is_causal: bool = False,
    ) -> Any:
        self._sleep(q, k, is_causal, 2.5)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def hop_seconds(comm: Collectives, n_elems: int, rounds: int) -> float:
    """Return the seconds of a hop of keys and values, with nothing beside it."""
    sent, received = (torch.zeros(n_elems, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(max(rounds, 5)):
        dist.barrier()
        begin = time.perf_counter()
        comm.shift(sent, received, 1).wait()
        times.append(time.perf_counter() - begin)
    slowest = comm.gather_numbers(median_spread(times)[0])
    return max(slowest)


def measure(tokens: int, heads: int, ratio: float, rounds: int) -> dict[str, Any]:
    comm, mute, sleeper = Collectives(), Mute(), Sleeper()
    cut = SequenceCut(tokens, comm.world_size)
    plan, n_local = plan_ring(cut), cut.tokens[comm.rank]
    hop = hop_seconds(comm, 2 * heads * n_local * WIDTH, rounds)
    sleeper.seconds = hop / ratio / (plan.work[comm.rank] * heads / comm.world_size)
    ring.block_attention, ring.block_attention_backward = sleeper.forward, sleeper.backward
    q, k, v = (torch.randn(1, heads, n_local, WIDTH).bfloat16().requires_grad_() for _ in range(3))
    grad = torch.randn_like(q)

    def step(ranks: Collectives) -> tuple[float, float]:
        dist.barrier()
        begin = time.perf_counter()
        out = ring_attention(q, k, v, ranks, cut)
        middle = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), grad)
        dist.barrier()
        return middle - begin, time.perf_counter() - middle

    found: dict[str, list[tuple[float, float]]] = {"sent": [], "alone": []}
    comm.ledger.reset_totals()
    for _ in range(rounds + WARMUP):
        found["sent"].append(step(comm))
        found["alone"].append(step(mute))
    shifted = comm.ledger.totals["shift"].wire_bytes / (rounds + WARMUP)
    expected = plan.wire_elems(comm.rank, heads, WIDTH)
    require(shifted == 2 * expected.keys * 2 + expected.grads * 4, f"the bytes are those of the formula: {shifted}")
    sent, alone = ([list(times) for times in zip(*found[name][WARMUP:])] for name in ("sent", "alone"))
    whole, least = ([a + b for a, b in zip(*times)] for times in (sent, alone))
    require(min(least) > comm.world_size * hop / ratio * 3.4, "nothing is faster than its blocks")
    work = plan.work
    return {
        "hop_over_block": ratio,
        "ms": round(median_spread(whole)[0] * 1e3, 1),
        "ms_alone": round(median_spread(least)[0] * 1e3, 1),
        "ms_hop": round(hop * 1e3, 1),
        "forward_ratio": round(median_spread(sent[0])[0] / median_spread(alone[0])[0], 3),
        "backward_ratio": round(median_spread(sent[1])[0] / median_spread(alone[1])[0], 3),
        **bound("ratio_to_alone", whole, least),
        "work_over_mean": round(max(work) * len(work) / sum(work), 4),
        "mib_sent": round(shifted / 2**20, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.8)
    args = parser.parse_args()
    sizes = {"tokens": args.tokens, "heads": args.heads}

    def rows() -> list[dict[str, Any]]:
        return [{**measure(args.tokens, args.heads, args.ratio, args.rounds), **sizes}]

    return run_on_hosts("ring_attention", HOSTS, RATE, rows)


if __name__ == "__main__":
    sys.exit(main())
