"""Copies for torch.save hold only their own elements, and file names follow DeepSpeed's layout."""

from __future__ import annotations

import collections
import io
from typing import NamedTuple

import torch

from deepspeed_c.compat import checkpoint_utils as utils


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


def saved_bytes(item) -> int:
    file = io.BytesIO()
    torch.save(item, file)
    return len(file.getvalue())


def test_copies_leave_the_flat_buffer_behind():
    flat = torch.arange(1_000_000.0, requires_grad=True)
    module = torch.nn.Linear(2, 2)
    item = {
        "view": flat[10:20], "strided": flat.view(1000, 1000)[:, 3], "list": [flat[:3], "text", None, (flat[5], 7)],
        "pair": Pair(flat[1:2], 3), "default": collections.defaultdict(list, x=flat[4:5]),
        "module": module.state_dict(),
    }  # fmt: skip
    copy = utils.clone_tensors_for_torch_save(item)
    assert saved_bytes(copy) < 10_000
    assert saved_bytes(item["view"]) > 4_000_000
    assert torch.equal(copy["view"], torch.arange(10.0, 20.0)) and not copy["view"].requires_grad
    assert torch.equal(copy["strided"], torch.arange(3.0, 1_000_000, 1000))
    assert copy["list"][1:3] == ["text", None] and copy["list"][3][1] == 7 and copy["list"][3][0] == 5
    assert type(copy["pair"]) is Pair and copy["pair"].a == 1 and copy["pair"].b == 3
    assert copy["default"]["x"] == 4 and copy["default"]["new"] == []
    assert (
        copy["module"]._metadata == item["module"]._metadata
        and item["module"]["weight"] is not copy["module"]["weight"]
    )
    assert item["view"].data_ptr() == flat[10:].data_ptr()
    same = torch.ones(3)
    assert utils.clone_tensors_for_torch_save(same, torch.device("cpu")).data_ptr() != same.data_ptr()
    assert utils.clone_tensors_for_torch_save(same, "meta").is_meta


def test_names_of_files():
    assert utils.get_model_ckpt_name_for_rank("d", "00") == "d/mp_rank_00_model_states.pt"
    assert utils.get_zero_ckpt_name_for_rank("d", 3, 1) == "d/zero_pp_rank_3_mp_rank_01_optim_states.pt"
    assert utils.get_layer_ckpt_name_for_rank("d", "layer_02", 1) == "d/layer_02-model_01_model_states.pt"
