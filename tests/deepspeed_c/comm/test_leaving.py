"""A process that ends right after a collective leaves with exit code 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The group outlives the script, as one that an engine holds does, and gloo's thread gives the tensor up while Python ends.
_SCRIPT = """
import sys

import torch
import torch.distributed as dist

import deepspeed_c

if sys.argv[1] == "torch's group":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed_c.init_distributed(verbose=False)
sys.group = dist.group.WORLD
sent = torch.ones(100000)
dist.all_reduce(sent, async_op=True)
"""


@pytest.mark.parametrize("whose", ["our group", "torch's group"])
def test_a_process_that_ends_right_after_a_collective_is_not_aborted(whose):
    """Without the wait at exit, most of these processes abort."""
    command = [sys.executable, "-c", _SCRIPT, whose]
    ended = [subprocess.run(command, check=False, capture_output=True, text=True, timeout=200) for _ in range(3)]
    assert [(done.returncode, done.stderr) for done in ended] == [(0, "")] * 3
