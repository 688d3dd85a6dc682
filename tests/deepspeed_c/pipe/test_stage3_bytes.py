"""What a batch of a pipeline sends at stage 3, to the byte.

Stage 2 sends S2 = messages + reductions + U bytes, where U gathers the updated weights. Stage 3 gathers weights as they
are used, and does not gather them after the update: it sends S3 = S2 - U + G. G is one gather of each unit, if the limit
holds all units of a rank, and nothing in joint memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_c.comm.ledger import all_ledgers
from tests.deepspeed_c.pipe.models import micro_batches, module_of
from tests.deepspeed_c.pipe.test_engine import SCHEDULES, config_of
from tests.ranks import run_ranks
from tests.training import engine_of

N = 4
# In the third batch the ranks compare nothing: neither orders of use nor messages.
BATCH = 2
GLOO = {"local": "off"}
JOINT = {"local": "shm", "zero_copy_gather": True}
BYTES_OF_FP32 = 4


def sent(engine: Any, data_rank: int) -> dict[str, int]:
    """Payload of ``BATCH`` by axes and operation, without numbers that ranks tell each other."""
    for step in range(BATCH):
        engine.train_batch(iter(micro_batches(step, data_rank, N)))
    for ledger in all_ledgers():
        ledger.reset_totals()
    engine.train_batch(iter(micro_batches(BATCH, data_rank, N)))
    found: dict[str, int] = {}
    for ledger in all_ledgers():
        for op, total in ledger.totals.items():
            if (ledger.axes, op) in (("dp_shard", "all-gather"), ("dp_shard", "reduce-scatter"), ("pp", "message")):
                found[op] = found.get(op, 0) + total.n_bytes
    return found


def body(
    rank: int, world: int, comm: dict[str, Any], bucket: int, options: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int], list[int], int]:
    """Returns (bytes of stage 2, bytes of stage 3, elements of the units, gathers of the batch at stage 3)."""
    traffic = []
    for stage in (2, 3):
        zero = {"stage": stage, "reduce_bucket_size": bucket}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        net = module_of(2, **options)
        config = config_of(N, zero_optimization=zero, comm=comm if stage == 3 else {"local": comm["local"]})
        with engine_of(net, config) as engine:
            traffic.append(sent(engine, net.mpu().get_data_parallel_rank()))
            if stage == 3:
                units = [group.numel for group in engine._fetcher.groups]
                stats = engine._fetcher.stats
                n_gathers = stats.n_gathers - stats.n_unexpected  # the order of the first batch is a guess
    return *traffic, units, n_gathers


# With buckets of 1,000 elements, units begin and end within layers, and layers use them in turns.
CELLS = [
    (schedule, 768 if (i + (comm is JOINT)) % 2 else 1000, i % 3 == 0, comm)
    for i, schedule in enumerate(SCHEDULES)
    for comm in (GLOO, JOINT)
]


@pytest.mark.parametrize("schedule, bucket, tied, comm", CELLS)
def test_stage_3_sends_what_stage_2_sends_and_one_gather_for_that_of_the_update(schedule, bucket, tied, comm):
    options = {"schedule": schedule, **SCHEDULES[schedule], "tied": tied}
    for rank, (two, three, units, n_gathers) in enumerate(run_ranks(4, body, comm, bucket, options)):
        told = (rank, two, three, units, n_gathers)
        assert len(units) > 3 and n_gathers == (BATCH + 1) * len(units), told
        assert two["message"] > 0 and two["reduce-scatter"] > 0 and two["all-gather"] > 0, told
        one_gather = 0 if comm is JOINT else BYTES_OF_FP32 * sum(units)
        assert sum(three.values()) == sum(two.values()) - two["all-gather"] + one_gather, told
        assert three.get("all-gather", 0) == one_gather, told
        assert three["message"] == two["message"] and three["reduce-scatter"] == two["reduce-scatter"], told
