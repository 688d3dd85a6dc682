"""What a step has alive, and the heap that a process takes for it, are compared with steps that run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from deepspeed_c.config import load_config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.plan.activations import Alive, ForwardShape, trace_activations
from deepspeed_c.plan.heap import HeapEvent, heap_peak
from deepspeed_c.plan.live_bytes import LiveBytes
from tests.deepspeed_c.plan.families import make, tokens
from tests.waits import ran

MIB = 1 << 20
BATCH = ForwardShape(8, 128)


def alive_in(model: torch.nn.Module, batch: ForwardShape) -> Alive:
    source = {"train_micro_batch_size_per_gpu": batch.n_samples}
    policy = Precision(load_config(source, world_size=1, batch="skip"), model)
    return trace_activations(model, batch, policy, None, "cpu").alive


def drop(param: torch.Tensor) -> None:
    param.grad = None


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_most_bytes_alive_are_those_of_a_step(family):
    with torch.device("meta"):
        planned = alive_in(make(family), BATCH)
    model, batch = make(family), tokens(*BATCH[:2])
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    with LiveBytes(without=[*model.parameters(), *model.buffers()]) as live:
        with live.phase("forward"):
            loss = model(**batch).loss
        with live.phase("backward"):
            loss.backward()
    for phase in ("forward", "backward"):
        # A run counts gradients too, each until its hook: less than the largest of them.
        most = live.peaks[phase] + MIB // 16
        assert 0.97 * live.peaks[phase] <= getattr(planned, phase) <= most, (planned, live.peaks)


def test_heap_of_no_tensors_and_of_some():
    assert heap_peak([]) == 0
    one = heap_peak([HeapEvent(1, 10 * MIB), HeapEvent(1, 0)])
    assert 10 * MIB <= one <= 10 * MIB + MIB // 4
    # After a step all blocks are free and joined, so the next step begins anew.
    sizes = [1, 64, 4096, 131071, 131072, 131073, 7 * MIB + 13]
    events = [HeapEvent(i, n) for i, n in enumerate(sizes)] + [HeapEvent(i, 0) for i in range(len(sizes))]
    assert sum(sizes) <= heap_peak(events) <= sum(sizes) + MIB


class Wide(torch.nn.Module):
    """A stack whose blocks have tensors of three sizes, as those of a transformer. ``tokens``: (samples, positions)."""

    def __init__(self, width: int = 256, n_blocks: int = 6) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(n_blocks)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


WIDE = ForwardShape(16, 128)


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def measure() -> None:
    """Prints the bytes that the process grows by in steps of ``Wide``, after steps of a small model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    small, wide = Wide(64, 1), Wide()
    for model in (small, wide):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(drop)
    for _ in range(2):
        small(torch.zeros(2, 128, dtype=torch.int64)).backward()
    before = status("VmRSS")
    for _ in range(8):
        wide(torch.zeros(WIDE.n_samples, WIDE.n_tokens, dtype=torch.int64)).backward()
    print(json.dumps(status("VmHWM") - before))


def test_a_process_grows_by_the_planned_heap():
    with torch.device("meta"):
        planned = alive_in(Wide(), WIDE)
    command = [sys.executable, "-c", "from tests.deepspeed_c.plan import test_heap; test_heap.measure()"]
    root = Path(__file__).parents[3]
    found = ran(command, cwd=root, check=True)
    measured = json.loads(found.stdout)
    print(f"{measured / MIB:.1f} MiB measured, {planned.heap / MIB:.1f} planned, {planned.backward / MIB:.1f} alive")
    assert abs(planned.heap / measured - 1) <= 0.08, (planned, measured)
