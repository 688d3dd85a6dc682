"""Weights on NVMe leave host memory: it shrinks by the size of the weights, and grows only by the configured
buffers."""

from __future__ import annotations

import json
import sys
import tempfile

import pytest

from tests.waits import ran

TIMEOUT_SECONDS = 300
MB = 1 << 20
# Allows for free memory within the heap, and for differences between two runs of one program. The ring of an I/O
# engine, or one bucket too many in each direction, would be more.
SLACK_BYTES = 16 * MB
N_LAYERS, WIDTH = 12, 1000  # 48 MB of fp32 weights; the 4,000,000 bytes of a layer are no whole number of pages

# Runs as "python -c PROGRAM folder section" in a process of its own, because memory that earlier tests left in the heap
# would count.
PROGRAM = f"""
import ctypes, gc, json, os, sys
import torch
import torch.distributed as dist
import deepspeed_c
from deepspeed_c.offload import place

folder, sections = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=0, world_size=1)
for section in sections.values():
    section |= {{"device": "nvme", "nvme_path": folder}}
zero = {{"stage": 3, "reduce_bucket_size": {WIDTH * WIDTH}, **sections}}
config = {{"train_batch_size": 1, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}, "zero_optimization": zero}}
stores = {{}}
make_swapper = place.make_swapper

def noted(folder, n_bytes, settings, where, *args, **kwargs):
    stores[where.split(".")[1]] = made = make_swapper(folder, n_bytes, settings, where, *args, **kwargs)
    return made

place.make_swapper = noted
with deepspeed_c.zero.Init(config_dict_or_path=config):
    model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({N_LAYERS})))
engine = deepspeed_c.initialize(model=model, config=config)[0]
held = {{}}
x = torch.randn(1, {WIDTH})
for _ in range(3):
    loss = engine(x).square().mean()
    held = {{name: max(held.get(name, 0), store.buffer_bytes) for name, store in stores.items()}}
    engine.backward(loss)
    held = {{name: max(held.get(name, 0), store.buffer_bytes) for name, store in stores.items()}}
    engine.step()
    held = {{name: max(held.get(name, 0), store.buffer_bytes) for name, store in stores.items()}}
del loss
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps of freed memory is chance
with open("/proc/self/smaps_rollup") as f:
    lines = dict(line.split(":") for line in f.read().splitlines()[1:])
own = 1024 * int(lines["Anonymous"].split()[0])  # not the libraries, whose pages other processes may have too
os.write(1, json.dumps({{"own": own, "buffers": held}}).encode())
"""


def measure(**sections: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        done = ran([sys.executable, "-c", PROGRAM, folder, json.dumps(sections)], timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("buffer_count", [2, 5])
def test_weights_on_nvme_take_their_buffers_and_no_more(buffer_count: int) -> None:
    states = {"buffer_count": 4, "pipeline_read": True, "pipeline_write": True}
    without = measure(offload_optimizer=states)
    found = measure(offload_optimizer=states, offload_param={"max_in_cpu": 0, "buffer_count": buffer_count})
    slice_bytes = -(-WIDTH * WIDTH * 4 // 4096) * 4096
    weights = found["buffers"]["offload_param"]
    assert 0 < weights <= buffer_count * slice_bytes, f"{weights / slice_bytes} buffers, {buffer_count} asked for"
    # A group of tensors has two moments. If the weights are in a file, it has masters too, because they are not the
    # weights.
    for name, run, n_tensors in (("without", without, 2), ("found", found, 3)):
        states_bytes = run["buffers"]["offload_optimizer"]
        assert 0 < states_bytes <= 4 * n_tensors * slice_bytes, f"{name}: {states_bytes / slice_bytes} buffers"
    more = sum(found["buffers"].values()) - sum(without["buffers"].values())
    expected = without["own"] - N_LAYERS * WIDTH * WIDTH * 4 + more
    print(
        f"{found['own'] / MB:.1f} MB held, {expected / MB:.1f} expected; {without['own'] / MB:.1f} without, {more / MB:.1f} of buffers"
    )
    assert found["own"] <= expected + SLACK_BYTES, (found, without)
