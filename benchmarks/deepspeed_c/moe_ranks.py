"""How much do experts on two ranks cost above their own work?

Two ranks with one thread each have a layer of 8 gated experts, top-2, without drops, on 2,048 tokens of 512 in fp32 a
rank. "spread" has half of the experts on each rank and exchanges rows through shared memory. "local" has all experts
on each rank, sends nothing and computes equally many rows. Then nine of ten tokens choose one expert first: "skewed"
is the spread layer, and "busiest" are the experts of the busiest rank alone, on as many rows as they get. Forward and
backward, in turns; the slower rank counts. The bytes in the ledger have to be those of the formula, 2 tokens k hidden
(1 - 1/ep).
Run: torchrun --nproc-per-node 2 -m benchmarks.deepspeed_c.moe_ranks [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

import deepspeed_c
from benchmarks.deepspeed_c.moe_layer import EXPERTS, HIDDEN, INNER, K, make_expert, values_of
from benchmarks.measure import in_turn, machine, median_spread, ratios, require
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.moe.layer import MoE

WARMUP = 2


def make_layer(ep_size: int, comm: Collectives) -> MoE:
    layer = MoE(
        HIDDEN,
        make_expert(torch),
        num_experts=EXPERTS,
        ep_size=ep_size,
        k=K,
        drop_tokens=False,
        top2_2nd_expert_sampling=False,
    )
    layer.deepspeed_moe.connect(comm if ep_size > 1 else comm.alone())
    experts = layer.deepspeed_moe.experts
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(values_of(torch, "gate", (EXPERTS, HIDDEN)))
        for number, expert in enumerate(experts.deepspeed_experts, experts.first_expert):
            expert.gate_up.weight.copy_(values_of(torch, f"gate_up {number}", (2 * INNER, HIDDEN)))
            expert.down.weight.copy_(values_of(torch, f"down {number}", (HIDDEN, INNER)))
    return layer


def skewed_indices(tokens: int) -> torch.Tensor:
    """Experts of each token: the first expert for nine of ten tokens, the others in turn."""
    first = torch.where(torch.arange(tokens) % 10 < 9, 0, 1 + torch.arange(tokens) % (EXPERTS - 1))
    second = (first + 1 + torch.arange(tokens) % (EXPERTS - 1)) % EXPERTS
    return torch.stack([first, second], dim=1).to(torch.int32)


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    comm = Collectives()
    comm.use_shared_memory("auto")
    spread, local = make_layer(comm.world_size, comm), make_layer(1, comm)
    x = values_of(torch, f"tokens of rank {comm.rank}", (tokens, HIDDEN)).requires_grad_()
    grad = values_of(torch, "gradient", (tokens, HIDDEN))
    indices = skewed_indices(tokens)
    busiest_counts = (torch.bincount(indices.view(-1), minlength=EXPERTS) * comm.world_size).tolist()[: EXPERTS // 2]
    rows = values_of(torch, "rows", (sum(busiest_counts), HIDDEN)).requires_grad_()
    experts = spread.deepspeed_moe.experts

    def layer_step(layer: MoE, **chosen: Any) -> torch.Tensor:
        x.grad = None
        layer.zero_grad()
        out = layer(x, **chosen)[0]
        out.backward(grad)
        return out

    def busiest() -> None:
        if comm.rank == 0:
            rows.grad = None
            experts.zero_grad()
            out = experts(rows, busiest_counts)
            out.backward(out.detach())

    steps: dict[str, Callable[[], Any]] = {
        "spread": lambda: layer_step(spread),
        "local": lambda: layer_step(local),
        "skewed": lambda: layer_step(spread, indices=indices),
        "busiest": busiest,
    }
    outs = {name: steps[name]().detach() for name in ("spread", "local")}
    off = float((outs["spread"] - outs["local"]).abs().max())
    require(off < 1e-4, f"both layers compute the same: off by {off}")
    comm.ledger.reset_totals()
    with torch.no_grad():
        spread(x)
    n_bytes = sum(comm.gather_numbers(comm.ledger.totals["all-to-all"].wire_bytes))
    # Two ways of all ranks' rows, and an int64 for each expert and rank.
    share = 1 - 1 / comm.world_size
    expected = comm.world_size * share * (2 * tokens * K * HIDDEN * x.element_size() + EXPERTS * 8)
    require(n_bytes == expected, f"the ledger has the bytes of the formula: {n_bytes} and {expected}")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + WARMUP):
        for name in in_turn(list(steps), i):
            comm.barrier()
            begin = time.perf_counter()
            steps[name]()
            spent = max(comm.gather_numbers(time.perf_counter() - begin))
            if i >= WARMUP:
                seconds[name].append(spent)
    line: dict[str, Any] = {"tokens": tokens, "hidden": HIDDEN, "experts": EXPERTS, "k": K, "ranks": comm.world_size}
    for name, spent in seconds.items():
        line[f"{name}_ms"] = round(1e3 * median_spread(spent)[0], 2)
    line |= ratios("ratio_to_local", seconds["spread"], seconds["local"])
    line |= ratios("skewed_to_busiest", seconds["skewed"], seconds["busiest"])
    return line | {"mib_sent": round(n_bytes / 2**20, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed_c.init_distributed()
    line = measure(args.tokens, args.rounds)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"benchmark": "moe_ranks", **line, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
