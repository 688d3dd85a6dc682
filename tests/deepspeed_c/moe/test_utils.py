"""What DeepSpeed's helpers find in a model (deepspeed_c/moe/utils.py). facts.py of tests/deepspeed_c/compat compares the
others with DeepSpeed."""

from __future__ import annotations

from torch import nn

from deepspeed_c.moe.layer import MoE
from deepspeed_c.moe.utils import configure_moe_param_groups, has_moe_layers, is_moe_param


def test_layers_and_their_parameters_are_found():
    assert has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    model = nn.Sequential(nn.Linear(2, 2), MoE(2, nn.Linear(2, 2), 6, ep_size=3), MoE(2, nn.Linear(2, 2), 4))
    assert has_moe_layers(model) == (True, 6)
    marked = [name for name, param in model.named_parameters() if is_moe_param(param)]
    assert len(marked) == 2 * 2 + 2 * 4 and all(".deepspeed_experts." in name for name in marked), marked
    shared, *experts = configure_moe_param_groups([*model.parameters()])
    assert len(shared["params"]) == 4 and [group["name"] for group in experts] == ["ep_size_3", "ep_size_1"]
    assert [len(group["params"]) for group in experts] == [4, 8] and all(group["moe"] for group in experts)
