"""How much time and memory does the loss of on-policy distillation take over a whole vocabulary, against torch?

``generalized_jsd_loss`` and the same formula in torch's operators, as trl's ``GKDTrainer`` writes it: logarithms of both
softmaxes, of the mixture, two divergences. 1,024 tokens x a vocabulary of 32,768, forward and backward. Contenders take
turns in one process. Losses and gradients are compared first.
Memory is the peak of live bytes beside both logits. Its bound is the student's gradient.
The bound of the time is what memory must move: both logits are read in the forward and again in the backward, and a
gradient is written. It is measured by an addition and a negation of torch, which read three such tensors and write two.
Run: python -m benchmarks.ops.distill_loss
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.measure import bound, keep_freed_memory, machine, median_spread, ratios, require, time_alternately
from deepspeed_c.distill import generalized_jsd_loss
from deepspeed_c.plan.live_bytes import LiveBytes

WARMUP = 1
LOSSES = {"forward KL": 0.0, "mixture": 0.5, "reverse KL": 1.0}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def with_torch(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    q, p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    if beta == 0:
        losses = F.kl_div(q, p, reduction="none", log_target=True)
    elif beta == 1:
        losses = F.kl_div(p, q, reduction="none", log_target=True)
    else:
        weights = torch.tensor([1 - beta, beta]).log()
        mixture = torch.logsumexp(torch.stack([q + weights[0], p + weights[1]]), dim=0)
        from_teacher = F.kl_div(mixture, p, reduction="none", log_target=True)
        losses = beta * from_teacher + (1 - beta) * F.kl_div(mixture, q, reduction="none", log_target=True)
    return losses.sum() / len(student)


def measure(name: str, dtype: torch.dtype, tokens: int, words: int, rounds: int) -> dict[str, object]:
    beta = LOSSES[name]
    rng = torch.Generator().manual_seed(0)
    student, teacher = ((4 * torch.randn(tokens, words, generator=rng)).to(dtype) for _ in range(2))
    student.requires_grad_()
    found: dict[str, tuple[float, torch.Tensor]] = {}

    def step_of(contender: str, loss_of: Loss) -> Callable[[object], None]:
        def step(_: object) -> None:
            found.pop(contender, None)
            loss = loss_of(student, teacher)
            (gradient,) = torch.autograd.grad(loss, student)
            found[contender] = loss.item(), gradient

        return step

    steps = {
        "own": step_of("own", lambda s, t: generalized_jsd_loss(s, t, beta=beta)),
        "torch": step_of("torch", lambda s, t: with_torch(s, t, beta)),
    }
    peaks = {}
    for contender, step in steps.items():
        found.clear()
        with LiveBytes(without=(student, teacher)) as live, live.phase("step"):
            step(None)
        peaks[contender] = live.peaks["step"]
    for step in steps.values():
        step(None)
    (loss, gradient), (wanted, wanted_gradient) = found["own"], found["torch"]
    require(abs(loss - wanted) <= 1e-4 * abs(wanted), f"losses are the same: {loss}, {wanted}")
    off, largest = float((gradient - wanted_gradient).abs().max()), float(wanted_gradient.abs().max())
    require(off <= (1e-3 if dtype == torch.float32 else 0.02) * largest, f"gradients are the same: {off} of {largest}")
    found.clear()
    del gradient, wanted_gradient
    # In float32: torch's operators on 16 bits are slower than memory.
    blocks = [torch.ones(student.nbytes // 4) for _ in range(3)]

    def move(_: object) -> None:
        torch.add(blocks[0], blocks[1], out=blocks[2])
        torch.neg(blocks[0], out=blocks[2])

    times = time_alternately({**steps, "moves": move}, None, rounds, WARMUP)
    return {
        "loss": name,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "words": words,
        "ms": round(1e3 * median_spread(times["own"])[0], 1),
        "ms_torch": round(1e3 * median_spread(times["torch"])[0], 1),
        "ms_moves": round(1e3 * median_spread(times["moves"])[0], 1),
        **ratios("ratio_to_torch", times["own"], times["torch"]),
        **bound("ratio_to_bound", times["own"], times["moves"]),
        "peak_mib": round(peaks["own"] / 2**20, 1),
        "peak_mib_torch": round(peaks["torch"] / 2**20, 1),
        "peak_to_torch": round(peaks["own"] / peaks["torch"], 4),
        "peak_to_gradient": round(peaks["own"] / student.nbytes, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--words", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    keep_freed_memory()
    for dtype in (torch.float32, torch.bfloat16):
        for name in LOSSES:
            row = measure(name, dtype, args.tokens, args.words, args.rounds)
            row["threads"] = torch.get_num_threads()
            print(json.dumps({"benchmark": "distill_loss", **row, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
