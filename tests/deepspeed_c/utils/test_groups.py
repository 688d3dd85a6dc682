"""Functions that return process groups: by default the group of all ranks, else groups of the engine's ``mpu``. Groups
of other kinds have one rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import deepspeed_c
from deepspeed_c import errors
from deepspeed_c.utils import groups
from tests.deepspeed_c.zero.traits import Mlp
from tests.ranks import run_ranks


class Alone:
    """Each rank trains a model of its own."""

    def __init__(self) -> None:
        self.all = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def get_data_parallel_group(self):
        return self.all[dist.get_rank()]


def look_up_body(rank: int, world: int) -> None:
    assert groups.get_data_parallel_group() is dist.group.WORLD is groups._get_sequence_data_parallel_group()
    assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (rank, world)
    assert groups._get_data_parallel_group_ranks() == [0, 1] and groups._get_broadcast_src_rank() == 0
    assert groups.get_tensor_model_parallel_src_rank() == rank
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    try:
        with deepspeed_c.initialize(model=Mlp(), config=config, mpu=Alone())[0]:
            assert (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()) == (0, 1)
            assert groups._get_data_parallel_group_ranks() == [rank] and groups._get_broadcast_src_rank() == rank
    finally:
        groups.initialize()
    assert groups.get_data_parallel_world_size() == world
    assert deepspeed_c.utils.is_initialized()


def test_data_parallel_ranks() -> None:
    run_ranks(2, look_up_body, fresh=True)  # other tests' engines leave groups of their meshes


def test_parallelism_of_other_kinds_is_of_one_rank() -> None:
    for kind in ("get_tensor_model_parallel", "get_model_parallel", "_get_sequence_parallel"):
        assert getattr(groups, kind + "_world_size")() == 1 and getattr(groups, kind + "_rank")() == 0
        with pytest.raises(errors.StateError, match="no group of one rank"):
            getattr(groups, kind + "_group")()
    groups.set_tensor_model_parallel_world_size(1)
    groups.set_tensor_model_parallel_rank(0)
    for wrong in (
        lambda: groups._get_expert_parallel_group("ep_size_2"),
        lambda: groups.set_tensor_model_parallel_world_size(2),
        lambda: groups.set_tensor_model_parallel_rank(1),
    ):
        with pytest.raises((errors.FeatureError, errors.StateError)):
            wrong()


def test_no_group_before_there_is_one() -> None:
    with pytest.raises(errors.CommError, match="not initialised"):
        groups.get_data_parallel_rank()
