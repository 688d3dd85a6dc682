"""The functions of ``deepspeed.runtime.utils``: norms compared with float64 and over ranks, containers, and
refusals."""

from __future__ import annotations

import json
import math
import os
import random
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c import errors
from deepspeed_c.utils import groups, runtime
from tests.ranks import run_ranks
from tests.waits import ran


def vector(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(17, 13), (1,), (0,), (5,)]
    return [torch.randn(*shape, generator=generator) * 10**i for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
def test_norms_against_float64(tensors, norm_type) -> None:
    filled = tensors if norm_type != math.inf else [t for t in tensors if t.numel()]
    want = torch.linalg.vector_norm(vector(filled), norm_type).item()
    got = runtime.get_global_norm_of_tensors(filled, norm_type).item()
    assert got == pytest.approx(want, rel=1e-6), (got, want)
    assert runtime.get_weight_norm([nn.Parameter(t) for t in filled], norm_type) == pytest.approx(want, rel=1e-6)


def test_norm_of_parts_is_the_norm(tensors) -> None:
    parts = [runtime.get_global_norm_of_tensors([t]).item() for t in tensors]
    assert runtime.get_global_norm(parts) == pytest.approx(vector(tensors).norm().item(), rel=1e-6)
    assert runtime.get_global_norm([]) == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norm_of_what_is_not_finite_is_minus_one_and_clips_nothing(tensors, bad) -> None:
    tensors[0][3, 4] = bad
    before = [t.clone() for t in tensors]
    assert runtime.clip_tensors_by_global_norm(tensors, max_norm=0.1).item() == -1
    assert all(torch.equal(a, b) for a, b in zip(tensors[1:], before[1:]))
    assert runtime.get_weight_norm(tensors) == -1


def test_16_bit_tensors_have_norms_beyond_their_range() -> None:
    big = torch.full((64,), 6e4, dtype=torch.float16)
    assert runtime.get_global_norm_of_tensors([big]).item() == pytest.approx(big[0].item() * 8, rel=1e-6)


def test_clipping_tensors(tensors) -> None:
    want = vector(tensors).norm().item()
    direction = vector(tensors) / want
    assert runtime.clip_tensors_by_global_norm(tensors, max_norm=2.0).item() == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(vector(tensors), direction * 2, rtol=1e-5, atol=1e-6)
    assert runtime.clip_tensors_by_global_norm(tensors, max_norm=100.0).item() == pytest.approx(2, rel=1e-5)
    assert vector(tensors).norm().item() == pytest.approx(2, rel=1e-5)  # the norm is already below the limit
    assert runtime.clip_tensors_by_global_norm(tensors, max_norm=1.0, global_norm=4.0) == 4.0
    assert vector(tensors).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_gradients_is_torchs_on_one_rank(tensors) -> None:
    ours = [nn.Parameter(torch.zeros_like(t)) for t in tensors] + [nn.Parameter(torch.zeros(3))]
    theirs = [nn.Parameter(torch.zeros_like(t)) for t in tensors]
    for p, q, t in zip(ours, theirs, tensors):
        p.grad, q.grad = t.clone(), t.clone()
    got = runtime.clip_grad_norm_(ours, 1.5)
    want = nn.utils.clip_grad_norm_(theirs, 1.5)
    torch.testing.assert_close(got, want)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad)
    assert ours[-1].grad is None
    single = nn.Parameter(torch.zeros(2))
    single.grad = torch.tensor([3.0, 4.0])
    assert runtime.clip_grad_norm_(single, 100.0).item() == 5


class Mpu:
    """An mpu of two ranks that hold parts of one model."""

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_model_parallel_rank(self):
        return dist.get_rank()


def over_ranks_body(rank: int, world: int) -> None:
    whole = nn.Parameter(torch.full((2,), 3.0))  # the same on both ranks, so it counts once
    part = nn.Parameter(torch.full((4,), 1.0 + rank))
    part.model_parallel = True
    assert runtime.is_model_parallel_parameter(part) and not runtime.is_model_parallel_parameter(whole)
    want = math.sqrt(2 * 9 + 4 * 1 + 4 * 4)
    assert abs(runtime.get_weight_norm([whole, part], mpu=Mpu()) - want) < 1e-5
    assert runtime.get_weight_norm([whole, part], math.inf, mpu=Mpu()) == 3
    assert abs(runtime.get_global_norm_of_tensors([part], mpu=Mpu()).item() - math.sqrt(4 + 16)) < 1e-5
    # All ranks of a data-parallel group scale by the mean of their norms.
    mine = nn.Parameter(torch.zeros(1))
    mine.grad = torch.tensor([2.0 + 4 * rank])
    assert runtime.clip_grad_norm_([mine], 2.0).item() == 4
    assert abs(mine.grad.item() - (1.0 + 2 * rank)) < 1e-5, mine.grad


def folder_size_body(rank: int, world: int, folder: str) -> int:
    return runtime.get_checkpoint_folder_size(folder, "tag", local_rank=rank)


def test_over_ranks(tmp_path) -> None:
    run_ranks(2, over_ranks_body)
    (tmp_path / "tag" / "below").mkdir(parents=True)
    (tmp_path / "tag" / "a").write_bytes(b"x" * 1000)
    (tmp_path / "tag" / "below" / "b").write_bytes(b"x" * 24)
    (tmp_path / "other").write_bytes(b"x")
    assert run_ranks(2, folder_size_body, str(tmp_path))[0] == 1024


def test_containers() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    nested = {"x": [weight, (torch.ones(4, dtype=torch.int64), "text")], "n": 3}
    assert runtime.get_tensor_bytes(nested) == 24 + 32 and runtime.get_tensor_bytes("text") == 0
    moved = runtime.move_to_device(nested, "meta")
    assert moved["x"][0].is_meta and moved["x"][1][0].is_meta and moved["x"][1][1] == "text" and moved["n"] == 3
    assert not weight.is_meta
    copied = runtime.copy_to_device(nested, "meta", lambda item: torch.is_tensor(item) and item.is_floating_point())
    assert copied["x"][0].is_meta and not copied["x"][1][0].is_meta and type(copied["x"][1]) is tuple
    in_place = runtime.move_to_device([weight, 5], "cpu", torch.is_tensor)
    assert in_place[0] is weight and in_place[1] == 5
    one, same = {"a": torch.arange(3), "b": "x"}, {"a": torch.arange(3), "b": "x"}
    assert runtime.compare_tensors_in_structures(one, same)
    for other in ({"a": torch.arange(3)}, {"a": torch.arange(4), "b": "x"}, {"a": 3, "b": "x"}, [torch.arange(3), "x"]):
        assert not runtime.compare_tensors_in_structures(one, other), other
    assert runtime.compare_tensors_in_structures([torch.ones(1)], [torch.ones(1)])
    assert not runtime.compare_tensors_in_structures([torch.ones(1)], [torch.zeros(1)])


@pytest.mark.parametrize("elements, alignment, padding", [([3, 4], 8, 1), ([8], 8, 0), ([1], 1, 0), ([9], 8, 7)])
def test_padding(elements, alignment, padding) -> None:
    aligned = runtime.align_dense_tensors([torch.ones(n) for n in elements], alignment)
    assert sum(t.numel() for t in aligned) == sum(elements) + padding
    assert sum(t.sum().item() for t in aligned) == sum(elements)


def test_empty_parameters_are_left_out() -> None:
    full, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
    assert runtime.filter_empty_parameters([full, empty]) == [full]
    groups_ = [{"params": [empty, full], "lr": 1}, {"params": [empty], "lr": 2}]
    assert runtime.filter_empty_parameters(groups_) == [{"params": [full], "lr": 1}]
    assert len(groups_[0]["params"]) == 2 and runtime.filter_empty_parameters([]) == []


@pytest.mark.parametrize("n_items", [0, 1, 2, 7, 12, 13])
@pytest.mark.parametrize("n_parts", [1, 3, 5])
def test_uniform_parts(n_items, n_parts) -> None:
    bounds = runtime.partition_uniform(n_items, n_parts)
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == n_items and len(sizes) == n_parts
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True), sizes


def spread_of(weights: list[int], bounds: list[int]) -> int:
    runs = [sum(weights[begin:end]) for begin, end in pairwise(bounds)]
    return max(runs) - min(runs)


def cut_of(weights: list[int], n_parts: int) -> list[int]:
    """The rule in words: add a last run to each best cut of the items before it, and take the most even one. Among
    several it is that with the shortest last run.
    """

    @cache
    def best(end: int, n: int) -> tuple[int, ...]:
        if n == 1:
            return (0, end)
        longer = [(*best(begin, n - 1), end) for begin in range(n - 1, end)]
        return min(longer, key=lambda bounds: (spread_of(weights, list(bounds)), -bounds[-2]))

    return list(best(len(weights), n_parts))


def weights_for(seed: int) -> list[int]:
    chosen = random.Random(seed)
    pool = chosen.choice(
        [[0, 0, 0, 5, 7], [2, 3, 5, 7, 11, 13, 101, 7919], [4], [0], [0, 10**9 + 7, 2**40 + 1, 50257 * 768]]
    )
    return [chosen.choice(pool) for _ in range(chosen.randint(1, 14))]


@pytest.mark.parametrize("seed", range(60))
def test_balanced_parts(seed) -> None:
    weights = weights_for(seed)
    for n_parts in range(1, len(weights)):
        got = runtime.partition_balanced(weights, n_parts)
        assert got == cut_of(weights, n_parts), (weights, n_parts, got, cut_of(weights, n_parts))
        assert got[0] == 0 and got[-1] == len(weights) and sorted(set(got)) == got, got
        if n_parts == 2:
            best = min(spread_of(weights, [0, cut, len(weights)]) for cut in range(1, len(weights)))
            assert spread_of(weights, got) == best, (weights, got, best)


# (weights, number of runs, the cuts of DeepSpeed 0.19.6).
CUTS = [
    ([0, 6208, 0, 0, 4160, 0, 260], 2, [0, 4, 7]), ([0] * 6, 3, [0, 4, 5, 6]), ([7] * 7, 3, [0, 3, 5, 7]),
    ([0, 0, 5, 0, 0, 5, 0], 4, [0, 4, 5, 6, 7]), ([2, 3, 5, 7, 11, 13], 4, [0, 3, 4, 5, 6]),
    ([100, 10, 10, 10, 10, 100], 3, [0, 1, 5, 6]), ([9, 0, 0, 0], 2, [0, 3, 4]), ([0, 0, 0, 9], 2, [0, 3, 4]),
    ([1, 0, 0], 5, [0, 1, 2, 3, 3, 3]), ([1] * 7, 3, [0, 3, 5, 7]),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "n_parts", "cut"), CUTS)
def test_balanced_parts_are_those_of_deepspeed(weights, n_parts, cut) -> None:
    assert runtime.partition_balanced(weights, n_parts) == cut


PEER = os.environ.get("DSC_PEER_PYTHON", "")
PEER_CUTS = """
import json, sys
from deepspeed.runtime.utils import partition_balanced, partition_uniform
cases = [[[int(at) for at in partition_balanced(w, n)], [int(at) for at in partition_uniform(len(w), n)]] for w, n in json.load(sys.stdin)]
print("@" + json.dumps(cases))
"""


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_parts_as_in_deepspeed() -> None:
    cases = [(weights_for(seed), n_parts) for seed in range(300) for n_parts in range(1, 9)]
    done = ran([PEER, "-c", PEER_CUTS], input=json.dumps(cases))
    assert done.returncode == 0, done.stderr
    for (weights, n_parts), want in zip(cases, json.loads(done.stdout.split("@")[-1]), strict=True):
        got = [runtime.partition_balanced(weights, n_parts), runtime.partition_uniform(len(weights), n_parts)]
        assert got == want, (weights, n_parts, got, want)


def test_masking() -> None:
    values = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    runtime.mask_nan_or_inf_with_val_inplace(values, val=-2.0)
    assert values.tolist() == [1, -2, -2, -2]


def test_memory_status(capsys) -> None:
    runtime.memory_status("before", print_rank=3)
    assert capsys.readouterr().out == ""
    runtime.memory_status("before", print_rank=0, reset_max=True)
    words = capsys.readouterr().out.split()
    assert "before:" in words and float(words[words.index("allocated") + 1]) > 0, words


def test_small_ones(tmp_path, monkeypatch) -> None:
    assert runtime.prefix_sum_inc([3, 4, 5]) == [3, 7, 12] and runtime.prefix_sum_inc([]) == []
    assert runtime.get_only_unique_item([4, 4]) == 4
    for wrong in ([], [1, 2]):
        with pytest.raises(errors.StateError, match="not all the same"):
            runtime.get_only_unique_item(wrong)
    assert runtime.call_to_str("send", 1, "a", to=[2]) == "send(1, 'a', to=[2])" and runtime.call_to_str("f") == "f()"
    monkeypatch.chdir(tmp_path)
    runtime.ensure_directory_exists("a/b/file")
    runtime.ensure_directory_exists("file")
    assert (tmp_path / "a" / "b").is_dir() and not (tmp_path / "a" / "b" / "file").exists()
    runtime.set_random_seed(2**70 + 5)
    first = random.random(), torch.rand(1).item()
    runtime.set_random_seed(2**70 + 5)
    assert (random.random(), torch.rand(1).item()) == first
    assert runtime.get_ma_status() > 0
    runtime.empty_cache()


def expert_norm_body(rank: int, world: int) -> list[float]:
    groups.create_expert_groups(2)
    mine = {"ep_size_2": [torch.full((3,), 2.0 + rank), torch.ones(2)]}
    found = [runtime.get_norm_with_moe_layers(3.0, None, mine), runtime.get_norm_with_moe_layers_fast(1.0 + rank, None)]
    found.append(runtime.get_norm_with_moe_layers(3.0, None, mine, math.inf))
    mine["ep_size_2"][0][rank] = math.nan
    return [*found, runtime.get_norm_with_moe_layers(3.0, None, mine)]


def test_norms_with_experts() -> None:
    want = [math.sqrt(9 + 3 * 4 + 2 + 3 * 9 + 2), 1.5, 3.0, -1]
    for rank, got in enumerate(run_ranks(2, expert_norm_body)):
        assert got == pytest.approx(want, rel=1e-6), (rank, got, want)
