"""Where stages begin: by parameters and classes as in DeepSpeed, by times as even as any cut can be."""

from __future__ import annotations

import itertools
import random

import pytest
from torch import nn

from deepspeed_c.errors import ConfigError
from deepspeed_c.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_c.pipe.partition import partition_layers
from tests.ranks import run_ranks


def brute_force(weights: list[int], n: int) -> int:
    """Cuts ``weights`` into n runs, none of them empty, so that the heaviest run is as light as possible; returns its
    weight."""
    cuts = itertools.combinations(range(1, len(weights)), n - 1)
    return min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights)))) for cut in cuts)


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_of_a_profile_is_as_fast_as_it_can_be(seed):
    random.seed(seed)
    weights = [random.choice([0, 1, 1, 2, 5, 9, 30]) for _ in range(random.randint(1, 10))]
    for n in range(1, len(weights) + 1):
        bounds = partition_layers("profile", n, ["Layer"] * len(weights), [], lambda: weights)
        assert bounds[0] == 0 and bounds[-1] == len(weights) and sorted(set(bounds)) == bounds
        heaviest = max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))
        assert heaviest == brute_force(weights, n), f"{weights} in {n}: {bounds}"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("size", "no method 'size'"),
        ("type:(", "no regular expression"),
        ("type:Conv", "matches 0 layers, and there are 2 stages"),
        ([0, 3], "does not cut 3 layers into 2 stages"),
        ([0, 0, 3], "does not cut"),
        ([0, 2, 4], "does not cut"),
    ],
)
def test_partition_refusals(method, words):
    with pytest.raises(ConfigError) as error:
        partition_layers(method, 2, ["Linear", "Tanh", "Linear"], [4, 0, 4], list)
    assert words in str(error.value)


def test_partition_methods():
    kinds, sizes = ["Embed", "Block", "Block", "Norm", "Head"], [100, 10, 10, 1, 100]
    assert partition_layers("uniform", 2, kinds, sizes, list) == [0, 3, 5]
    for method in ("parameters", "best"):
        assert partition_layers(method, 2, kinds, sizes, list) == [0, 2, 5]
    assert partition_layers("type:block", 2, kinds, sizes, list) == [0, 2, 5]
    assert partition_layers("uniform", 3, [*kinds, "Loss", "Loss"], [*sizes, 0, 0], list) == [0, 3, 5, 7]
    with pytest.raises(ConfigError, match="5 layers for 6 stages"):
        partition_layers("uniform", 6, kinds, sizes, list)


def parts_of(rank: int, world: int) -> list[list[int]]:
    alexnet = [
        nn.Dropout(0.0),
        nn.Linear(96, 64),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    ]
    tied = TiedLayerSpec("words", nn.Linear, 50, 8)
    gpt = [tied, *[LayerSpec(nn.Linear, 8, 8) for _ in range(4)], lambda x: x, tied]
    again = nn.Linear(30, 30)
    twice = [again, nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9), again]
    return [PipelineModule(layers, num_stages=world).partitions() for layers in (alexnet, gpt, twice)]


def test_layers_without_parameters_count_nothing_and_tied_ones_each():
    """DeepSpeed counts so: the weights of each layer, even if another layer has the same."""
    for found in run_ranks(2, parts_of):
        assert found == [[0, 4, 7], [0, 3, 7], [0, 3, 5]], found
