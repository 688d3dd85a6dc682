"""DeepSpeed's estimate functions: bytes follow the ZeRO paper, sharded parameters count with their whole sizes, and
every option is printed."""

from __future__ import annotations

import pytest
import torch

from deepspeed_c import zero
from deepspeed_c.compat import zero_estimate as estimate
from deepspeed_c.errors import ConfigError
from deepspeed_c.zero.weights.param import state_of

P = 7_000_000_000
LAYER = 200_000_000


def test_stage_2_is_the_papers_formula():
    # 2P + 14P/N, arXiv 1910.02054 section 5.2
    host, device = zero.estimate_zero2_model_states_mem_needs(P, 8, 8, cpu_offload=False)
    assert device == 2 * P + 14 * P // 64
    assert host == 4 * P * 8 * 3 // 2  # each of eight processes builds the fp32 model; DeepSpeed multiplies by 1.5


def test_stage_2_with_offload_leaves_the_weights_on_the_device():
    host, device = zero.estimate_zero2_model_states_mem_needs(P, 2, 1, additional_buffer_factor=1.0)
    assert (host, device) == (14 * P, 2 * P)


def test_stage_3_is_the_papers_formula_and_a_layer():
    host, device, layer = zero.estimate_zero3_model_states_mem_needs(P, LAYER, 8, 8, cpu_offload=False)
    assert layer == 4 * LAYER
    assert device == 4 * LAYER + 16 * P // 64
    assert host == 4 * LAYER * 8 * 3 // 2


@pytest.mark.parametrize(
    ("offload_params", "zero_init", "host", "device"),
    [
        (True, True, 16 * P, 4 * LAYER),
        (True, False, 32 * P, 4 * LAYER),  # eight whole fp32 models take more than one set of states
        (False, True, 14 * P, 4 * LAYER + 2 * P // 8),
        (False, False, 32 * P, 4 * LAYER + 2 * P // 8),
    ],
)
def test_stage_3_with_offload(offload_params, zero_init, host, device):
    found = zero.estimate_zero3_model_states_mem_needs(
        P, LAYER, 8, 1, cpu_offload_params=offload_params, zero_init=zero_init, additional_buffer_factor=1.0
    )
    assert found == (host, device, 4 * LAYER)


@pytest.mark.parametrize(
    "call",
    [
        lambda: zero.estimate_zero2_model_states_mem_needs(-1),
        lambda: zero.estimate_zero2_model_states_mem_needs(1, num_nodes=0),
        lambda: zero.estimate_zero3_model_states_mem_needs(10, 11),
        lambda: zero.estimate_zero3_model_states_mem_needs(10, 1, num_gpus_per_node=0),
    ],
)
def test_what_is_no_count_is_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_an_empty_model_takes_nothing():
    assert zero.estimate_zero3_model_states_mem_needs(0, 0) == (0, 0, 0)
    assert estimate.model_to_params(torch.nn.ReLU()) == (0, 0)


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 7), torch.nn.Linear(7, 5, bias=False))
    model[2].weight = model[0].weight  # a tied weight counts once
    return model


def count_sharded(rank: int, world: int) -> tuple[bool, tuple[int, int]]:
    with zero.Init():
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 7))
    return all(state_of(p) is not None for p in model.parameters()), estimate.model_to_params(model)


def test_sharded_parameters_count_whole(run_ranks):
    assert run_ranks(2, count_sharded) == [(True, (7 * 5 + 5 + 5 * 7 + 7, 5 * 7 + 7))] * 2


def test_tied_parameters_count_once_and_meta_ones_too():
    with torch.device("meta"):
        model = make_model()
    assert estimate.model_to_params(model) == (7 * 5 + 5 + 5 * 7 + 7, 5 * 7 + 7)


def test_every_choice_is_printed(capsys):
    zero.estimate_zero2_model_states_mem_needs_all_live(make_model(), 4, 2)
    assert [line.split(" | ")[2] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "offload_optimizer=cpu ",
        "offload_optimizer=none",
    ]
    zero.estimate_zero3_model_states_mem_needs_all_live(make_model())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 6 and len(set(lines)) == 8
    zero.estimate_zero3_model_states_mem_needs_all_cold(P, LAYER, 8, 8)
    out = capsys.readouterr().out
    assert "7000M parameters, 200M in the largest layer on 8 x 8 ranks" in out
    assert f"{(4 * LAYER + 16 * P / 64) / 2**30:.2f}GB" in out
