"""DeepSpeed's files of tensor-parallel ranks: a whole checkpoint is written as such files and read back bit for bit, at
every stage."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_c.checkpoint.formats.deepspeed import open_deepspeed, write_deepspeed
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.tensor_ranks import PartSource, TensorCut, megatron_cut, rules_of_info
from deepspeed_c.checkpoint.formats.torch_file import materialize
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, Box, LogicalTensor, ParamInfo, Read, Source, Topology
from deepspeed_c.checkpoint.tools import cli
from deepspeed_c.errors import CheckpointError

STATES = ("exp_avg", "exp_avg_sq")
# name -> (shape, the dimension that Megatron cuts, parts)
NAMES = {
    "word_embeddings.weight": ((12, 6), 0, 1), "layers.0.input_layernorm.weight": ((6,), None, 1),
    "layers.0.attention.query_key_value.weight": ((36, 6), 0, 3),
    "layers.0.attention.query_key_value.bias": ((36,), 0, 3), "layers.0.attention.dense.weight": ((6, 12), 1, 1),
    "layers.0.attention.dense.bias": ((6,), None, 1), "layers.0.mlp.dense_h_to_4h.weight": ((24, 6), 0, 1),
    "layers.0.mlp.dense_h_to_4h.bias": ((24,), 0, 1), "layers.0.mlp.dense_4h_to_h.weight": ((6, 24), 1, 1),
    "layers.0.mlp.dense_4h_to_h.bias": ((6,), None, 1),
}  # fmt: skip


class Whole(Source):
    """A checkpoint in memory, with Megatron's names and the states of Adam."""

    def __init__(self, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(5)
        self.where, self.format, self.aliases = "memory", "deepspeed_c", {"lm_head.weight": "word_embeddings.weight"}
        self.topology, self.groups = Topology(), [{"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}]
        self.state = {
            "counters": {"global_steps": 4, "global_samples": 16, "skipped_steps": 0},
            "client_state": {"epoch": 2},
        }
        self.data: dict[tuple[str, str], torch.Tensor] = {}
        self.params = {}
        for name, (shape, _, _) in NAMES.items():
            exact = torch.randn(shape, generator=rng)
            self.data[PARAM, name] = exact.to(dtype)
            if dtype != torch.float32:
                self.data[MASTER, name] = exact
            self.data |= {(state, name): torch.rand(shape, generator=rng) for state in STATES}
            self.params[name] = ParamInfo(group=0, counts={"step": torch.tensor(4.0)})
        self.data[BUFFER, "counted"] = torch.arange(3.0)
        self.tensors = {
            (kind, name): LogicalTensor(name=name, kind=kind, shape=tuple(value.shape), dtype=value.dtype)
            for (kind, name), value in self.data.items()
        }

    def read(self, reads: Sequence[Read]) -> None:
        for tensor, begin, into, box in reads:
            value = self.data[tensor.key]
            if box is not None:
                value = value[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
            into.copy_(value.reshape(-1)[begin : begin + into.numel()])


def read_all(source: Source) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for key, tensor in source.tensors.items():
        found[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        source.read([Read(tensor, 0, found[key].view(-1))])
    return found


def slices(value: torch.Tensor, dim: int | None, n_parts: int, world: int, rank: int) -> torch.Tensor:
    """The part of a rank, by brute force."""
    if dim is None:
        return value
    size = value.shape[dim] // n_parts
    mine = [i for i in range(value.shape[dim]) if i % size * world // size == rank]
    return value.index_select(dim, torch.tensor(mine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("stage", "world", "tp"), [(0, 1, 2), (0, 1, 3), (1, 2, 2), (2, 3, 6), (3, 2, 2), (3, 1, 3)])
def test_a_checkpoint_goes_there_and_back(tmp_path: Path, stage: int, world: int, tp: int, dtype: torch.dtype) -> None:
    source = Whole(dtype)
    path = Path(
        write_deepspeed(source, tmp_path, tag="t", world_size=world, stage=stage, dtype=dtype, n_tensor_ranks=tp)
    )
    files = {file.name for file in path.iterdir()}
    assert f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_{tp - 1:02d}_model_states.pt" in files
    assert len(files) == tp * ((world if stage == 3 else 1) + (world if stage else 0))
    if stage < 3:  # each file equals the file of a DeepSpeed engine on that rank
        for rank in range(tp):
            content = materialize(read_file(path / f"mp_rank_{rank:02d}_model_states.pt").content)
            assert content["mp_world_size"] == tp and content["epoch"] == 2
            for name, (_, dim, n_parts) in NAMES.items():
                assert torch.equal(content["module"][name], slices(source.data[PARAM, name], dim, n_parts, tp, rank)), (
                    name
                )
    with open_deepspeed(str(tmp_path)) as merged:
        assert merged.topology == Topology(world_size=world, stage=stage, tensor_parallel=tp) and not merged.problem
        assert merged.state["client_state"] == {"epoch": 2} and merged.aliases == source.aliases
        assert {name: info.group for name, info in merged.params.items()} == dict.fromkeys(NAMES, 0)
        found = read_all(merged)
        for key, value in source.data.items():
            if key[0] == PARAM and key not in found:  # a file may have the master of a parameter without the weight
                value, key = source.data.get((MASTER, key[1]), value), (MASTER, key[1])
            assert torch.equal(found[key], value.to(found[key].dtype)), key
        assert {state for state, _ in found} >= {*STATES, BUFFER}
        # Read by range and by box, as an engine does.
        tensor = merged.tensors["exp_avg", "layers.0.attention.dense.weight"]
        box = Box((1, 3), (4, 7))
        into = torch.empty(9, dtype=torch.float64)
        merged.read([Read(tensor, 5, into, box)])
        assert torch.equal(into, source.data["exp_avg", tensor.name][1:5, 3:10].reshape(-1)[5:14].double())


INFO = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": [r"^.*\.down\.weight$"],
    "tp_replicated_parameter_patterns": [r"^.*norm\.weight$", r"^.*\.down\.bias$"],
    "vocabulary_parameter_patterns": [r"^words\.weight$"],
    "original_vocab_size": 7,
    "parameter_with_sub_params": [
        {"patterns": [r"^a\.qkv\.weight$"], "shape": [(6, 4, 2), -1], "partition_dim": 0},
        {"patterns": [r"^a\.halves\.weight$"], "shape": [2, -1], "partition_dim": 0},
    ],
    "sub_param_shard_widths": {r"^a\.qkv\.weight$": [[4, 2], [2, 2], [2, 0]]},
    "parameter_to_average_patterns": [r"^mean$"],
    "autotp_unsupported_parameter_patterns": {r"^a\.strange$": "its blocks are mixed"},
}


def test_rules_that_deepspeed_saves() -> None:
    rules = rules_of_info(INFO, "file")
    rng = torch.Generator().manual_seed(1)
    qkv, halves, down = (torch.randn(*shape, generator=rng) for shape in ((12, 3), (8, 3), (3, 8)))
    parts = [torch.cat([qkv[0:4], qkv[6:8], qkv[10:12]]), torch.cat([qkv[4:6], qkv[8:10]])]
    assert torch.equal(rules("a.qkv.weight").merge(parts, "x"), qkv)
    for rank in range(2):
        assert torch.equal(rules("a.qkv.weight").split(qkv, 2, rank, "x"), parts[rank])
    parts = [torch.cat([halves[0:2], halves[4:6]]), torch.cat([halves[2:4], halves[6:8]])]
    assert torch.equal(rules("a.halves.weight").merge(parts, "x"), halves)
    assert torch.equal(rules("a.down.weight").merge([down[:, :5], down[:, 5:]], "x"), down)  # parts may have any widths
    assert rules("a.down.bias") == rules("a.norm.weight") == TensorCut(None)
    words = torch.randn(8, 2, generator=rng)  # one row of padding, as ranks add
    assert torch.equal(rules("words.weight").merge([words[:4], words[4:]], "x"), words[:7])
    assert rules("mean").merge([torch.tensor([1.0]), torch.tensor([2.0])], "x") == 1.5
    assert rules("a.up.weight") == TensorCut(0)  # DeepSpeed's converter uses this by default for other names
    with pytest.raises(CheckpointError, match="its blocks are mixed"):
        rules("a.strange")
    nan = torch.full((2,), math.nan)
    assert rules("a.norm.weight").merge([nan, nan.clone()], "x") is nan


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: rules_of_info({"tp_replicated_parameter_patterns": ["("]}, "f"), "is no pattern"),
        (lambda: rules_of_info({"parameter_to_average_patterns": "a"}, "f"), "is a str, not a list"),
        (lambda: rules_of_info({"sub_param_shard_widths": [1]}, "f"), "is a list, not an object"),
        (lambda: TensorCut(0).merge([torch.zeros(2, 3), torch.zeros(2, 4)], "f"), "do not fit along dimension 0"),
        (lambda: TensorCut(None).merge([torch.zeros(2), torch.ones(2)], "f"), "differs among ranks"),
        (lambda: TensorCut(0, n_rows=9).merge([torch.zeros(2, 3)] * 2, "f"), "has 4 rows of 9"),
        (lambda: TensorCut(0, n_parts=3).split(torch.zeros(10, 2), 2, 0, "f"), "10 elements along dimension 0"),
        (lambda: TensorCut(0, 2, ((1, 1), (2, 2))).merge([torch.zeros(2, 1), torch.zeros(4, 1)], "f"), "parts are not"),
        (lambda: TensorCut(2).split(torch.zeros(2, 2), 2, 0, "f"), "has no dimension 2"),
        (lambda: megatron_cut("a.attention.query_key_value.weight", 7), "version 7 is not known"),
        (lambda: PartSource(Whole(torch.float32), lambda name: None, 2, 0), "no rule says along which dimension"),
        (lambda: PartSource(Whole(torch.float32), lambda name: megatron_cut(name, 0), 5, 0), "are not 5 equal parts"),
    ],
)
def test_what_does_not_fit_is_refused(act: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as caught:
        act()
    assert "Fix: " in str(caught.value)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    source = Whole(torch.float32)
    for folder, tp in (("two", 2), ("three", 3)):
        write_deepspeed(
            source, tmp_path / folder, tag="t", world_size=1, stage=0, dtype=torch.float32, n_tensor_ranks=tp
        )
    two, three = tmp_path / "two" / "t", tmp_path / "three" / "t"
    (three / "mp_rank_01_model_states.pt").rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="no model file of DeepSpeed of tensor-parallel rank 1"):
        open_deepspeed(str(tmp_path / "three"))
    (three / "mp_rank_02_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="saved by 3 tensor-parallel ranks, and files of 1"):
        open_deepspeed(str(tmp_path / "three"))
    (two / "mp_rank_01_model_states.pt").write_bytes((tmp_path / "kept").read_bytes())
    with pytest.raises(CheckpointError, match="saved by 3 tensor-parallel ranks, and files of 2"):
        open_deepspeed(str(tmp_path / "two"))


def test_nothing_is_written_where_one_tensor_cannot_be_cut(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not 5 equal parts"):
        write_deepspeed(
            Whole(torch.float32), tmp_path, tag="t", world_size=1, stage=0, dtype=torch.float32, n_tensor_ranks=5
        )
    assert not list(tmp_path.rglob("*.pt"))


def test_the_command_converts_with_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Whole(torch.float32)
    write_deepspeed(source, tmp_path / "one", tag="t", world_size=1, stage=1, dtype=torch.float32)
    rules = tmp_path / "rules.json"
    rules.write_text(
        json.dumps(
            {
                "parameter_with_row_parallelism_patterns": [r".*dense\.weight$", r".*dense_4h_to_h\.weight$"],
                "tp_replicated_parameter_patterns": [
                    r".*layernorm\.weight$",
                    r".*dense\.bias$",
                    r".*dense_4h_to_h\.bias$",
                ],
            }
        )
    )
    words = ["convert", str(tmp_path / "one"), str(tmp_path / "two"), "--to", "deepspeed"]
    assert cli.main([*words, "--tp", "2", "--tp-rules", str(rules), "--new-tag", "t"]) == 0
    content = materialize(read_file(tmp_path / "two" / "t" / "mp_rank_01_model_states.pt").content)
    name = "layers.0.attention.query_key_value.weight"  # the rules of the test take this weight for one matrix
    assert torch.equal(content["module"][name], source.data[PARAM, name][18:])
    assert cli.main(["convert", str(tmp_path / "two"), str(tmp_path / "back"), "--to", "deepspeed_c"]) == 0
    assert cli.main(["info", str(tmp_path / "two")]) == 0 and "10 tensors" not in capsys.readouterr().err
    with open_deepspeed(str(tmp_path / "two")) as merged:
        found = read_all(merged)
    assert all(torch.equal(found[key], value) for key, value in source.data.items())
    with pytest.raises(CheckpointError, match="has no tensor_ranks"):
        cli.main(["convert", str(tmp_path / "one"), str(tmp_path / "x"), "--to", "torch-dcp", "--tp", "2"])
