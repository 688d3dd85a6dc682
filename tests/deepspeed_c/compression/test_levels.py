"""The numbers of quantized weights and activations (deepspeed_c/compression/levels.py): against fp64, the same as
DeepSpeed's where it is there, and packed without a change."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.compression.levels import Levels, codes_on, quantize_rows, rows_grid
from deepspeed_c.errors import UnsupportedConfigError
from tests.deepspeed_c.compression.peer_compression import model_of, outputs_of

PEER = os.environ.get("DSC_PEER_PYTHON", "")
LEVELS, KINDS = ("deepspeed", "compressed-tensors"), ("symmetric", "asymmetric")


def numbers_of(low: float, high: float, bits: int, levels: str, kind: str) -> Tensor:
    """The 2^bits numbers that a range has, in fp64."""
    codes = torch.arange(2**bits).double()
    n_steps = 2**bits if levels == "deepspeed" else 2**bits - 1
    if kind == "symmetric":
        return (codes - 2 ** (bits - 1)) * (2 * max(-low, high) / n_steps)
    if levels == "compressed-tensors":
        low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / n_steps
    return (codes + round(low / step)) * step


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", LEVELS)
def test_a_row_gets_the_nearest_numbers_of_its_range(levels: str, kind: str, bits: int):
    torch.manual_seed(1)
    x = torch.randn(5, 37) * torch.tensor([1e-3, 1, 50, 1, 1])[:, None] + torch.tensor([0, 0, 0, 3, -90.0])[:, None]
    found = quantize_rows(x, bits, levels=levels, is_symmetric=kind == "symmetric").double()
    for row, values in zip(found, x.double(), strict=True):
        numbers = numbers_of(values.min().item(), values.max().item(), bits, levels, kind)
        error, least = (row - values).abs(), (numbers - values[:, None]).abs().amin(1)
        is_number = (row[:, None] - numbers).abs().amin(1)
        print(levels, kind, bits, (error - least).abs().max(), is_number.max())
        assert (error - least).abs().max() <= 4e-6 * values.abs().max() and is_number.max() <= 4e-6 * values.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("number", [0.0, 3.0, -3.0, 1e-30])
def test_rows_of_one_number_and_no_rows(number: float, levels: str, kind: str):
    """DeepSpeed divides 0 by 0."""
    x = torch.full((2, 3), number)
    y = quantize_rows(x, 4, levels=levels, is_symmetric=kind == "symmetric")
    print(number, y)
    step = 0.0 if kind == "asymmetric" else abs(number) / (8 if levels == "deepspeed" else 15)  # the end has no code
    assert (y - x).abs().max() <= step * 1.001 + 4e-7 * abs(number) + (1e-29 if abs(number) < 1e-20 else 0)
    assert quantize_rows(x[:0], 4, levels=levels, is_symmetric=True).shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_random_directions_keep_the_mean_and_gradients_pass(kind: str):
    x = (torch.arange(64).float() - 20).view(1, 64).requires_grad_()
    drawn = [
        quantize_rows(x, 4, levels="deepspeed", is_symmetric=kind == "symmetric", seed=seed) for seed in range(400)
    ]
    mean = torch.stack([each.detach() for each in drawn]).double().mean(0)
    step, is_inside = (84 / 16 if kind == "symmetric" else 63 / 16), slice(0, 55)  # the last code is below the range
    print(kind, (mean - x.detach())[0, is_inside].abs().max())
    assert (mean - x.detach())[0, is_inside].abs().max() < step * 0.15  # 6 deviations of a mean of 400
    parts = [
        quantize_rows(part, 4, levels="deepspeed", is_symmetric=kind == "symmetric", seed=3, offset=64 * i)
        for i, part in enumerate((x.detach(), x.detach() * 2))
    ]
    whole = torch.cat([x.detach(), x.detach() * 2])
    assert torch.equal(
        torch.cat(parts), quantize_rows(whole, 4, levels="deepspeed", is_symmetric=kind == "symmetric", seed=3)
    )
    drawn[0].square().sum().backward()
    assert torch.equal(x.grad, 2 * drawn[0].detach())


def weights(
    bits: int, kind: str, n_groups: int, modules: tuple[str, ...] = ("0", "1", "3"), **shared: Any
) -> dict[str, Any]:
    parameters = {
        "enabled": True,
        "quantize_weight_in_forward": True,
        "quantize_groups": n_groups,
        "schedule_offset": 0,
    }
    params = {"start_bits": bits, "target_bits": bits, "quantization_period": 0}
    return {
        "shared_parameters": {**parameters, "quantization_type": kind, **shared},
        "different_groups": {"g": {"params": params, "modules": list(modules)}},
    }


def pruned(method: str, ratio: float, modules: list[str], related: Any = None, **shared: Any) -> dict[str, Any]:
    group = {"params": {"dense_ratio": ratio}, "modules": modules, **({"related_modules": related} if related else {})}
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "method": method, **shared},
        "different_groups": {"g": group},
    }


@pytest.mark.parametrize("pack", [True, "int-quantized"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("prunes", [False, True])
def test_packed_values_are_those_of_training(prunes: bool, levels: str, kind: str, bits: int, pack: Any):
    torch.manual_seed(2)
    config = {"compression_training": {"weight_quantization": weights(bits, kind, 8, ("1", "3"), levels=levels)}}
    if prunes:
        config["compression_training"]["sparse_pruning"] = pruned("l1", 0.4, ["1"])
        config["compression_training"]["row_pruning"] = pruned("topk", 0.4, ["3"])
    model = init_compression(
        nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)).eval(), config
    )
    words = torch.randint(0, 12, (4, 6))
    trained = model(words).detach()
    packed = redundancy_clean(copy.deepcopy(model), config, pack=pack)
    cleaned = redundancy_clean(model, config)
    for i in (1, 3):
        found, wanted = packed[i].weight.detach().clone(), cleaned[i].weight.detach()
        print(levels, kind, bits, prunes, (found - wanted).abs().max(), (wanted == 0).float().mean())
        assert torch.equal(found, wanted) and bool((wanted == 0).float().mean() > 0.5) == prunes
        assert torch.equal(packed[i].bias, cleaned[i].bias)
    assert torch.equal(cleaned(words), trained), (cleaned(words) - trained).abs().max()
    torch.testing.assert_close(packed(words), trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pack", [True, "int-quantized"])
def test_a_zero_point_that_is_no_code_is_named_and_changes_nothing(pack: Any):
    model = nn.Sequential(nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[2] = torch.linspace(5, 6, 8)
    config = {"compression_training": {"weight_quantization": weights(8, "asymmetric", 4, ("0",))}}
    init_compression(model.eval(), config)
    x = torch.randn(3, 8)
    before = model(x)
    with pytest.raises(
        UnsupportedConfigError, match=r"0\.weight: the zero point -1408 of group 2[^$]*compressed-tensors"
    ):
        redundancy_clean(model, config, pack=pack)
    assert torch.equal(model(x), before)
    config["compression_training"]["weight_quantization"]["shared_parameters"]["levels"] = "compressed-tensors"
    other = init_compression(nn.Sequential(nn.Linear(8, 4)).eval(), config)
    other.load_state_dict(model.state_dict())
    before = other(x)
    torch.testing.assert_close(redundancy_clean(other, config, pack=pack)(x), before, rtol=0, atol=1e-5)


def activations(bits: int, kind: str, calibration: str) -> dict[str, Any]:
    return {
        "shared_parameters": {
            "enabled": True,
            "schedule_offset": 0,
            "quantization_type": kind,
            "range_calibration": calibration,
        },
        "different_groups": {"g": {"params": {"bits": bits}, "modules": ["1", "3"]}},
    }


def cases() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for bits in (8, 4):
        for kind in KINDS:
            for n_groups in (1, 8, 48):
                made[f"weights {bits} {kind} {n_groups}"] = {"weight_quantization": weights(bits, kind, n_groups)}
            for calibration in ("dynamic", "static"):
                made[f"{calibration} {bits} {kind}"] = {"activation_quantization": activations(bits, kind, calibration)}
    late = {"schedule_offset_end": 10**6, "schedule_offset_stride": 7}
    row, head = pruned("topk", 0.3, ["1"]), pruned("topk", 0.5, ["3"], num_heads=4)
    made["magnitudes"] = {"sparse_pruning": pruned("l1", 0.3, ["1", "3"], **late)}
    made["scores"] = {"sparse_pruning": pruned("topk", 0.3, ["1"], **late)}
    made["rows"], made["heads"] = {"row_pruning": row}, {"head_pruning": head}
    for method in ("l1", "topk"):
        made[f"smaller, {method}"] = {"row_pruning": pruned(method, 0.3, ["1"], [["3"]])}
    made["fewer heads"] = {"head_pruning": pruned("topk", 0.5, ["3"], [["1"]], num_heads=4)}
    made["rows, then rounded"] = {"row_pruning": row, "weight_quantization": weights(4, "asymmetric", 1)}
    made["all"] = {
        **made["scores"],
        "row_pruning": row,
        "head_pruning": head,
        "weight_quantization": weights(4, "symmetric", 8),
        "activation_quantization": activations(8, "symmetric", "dynamic"),
    }
    return made


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_outputs_and_cleaned_weights_are_those_of_deepspeed(tmp_path: Path):
    """In float32: quantized weights and activations, and masks, one by one and together."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    values = {name: value * 3 for name, value in plain.state_dict().items()}
    shapes = {"1.sparse_mask_scores": (24, 8), "1.row_mask_scores": (24, 1), "3.head_pruning_scores": (1, 4)}
    given = {
        "values": values,
        "words": [torch.randint(0, 12, (4, 6)) for _ in range(2)],
        "scores": {name: torch.randn(shape) for name, shape in shapes.items()},
    }
    made = cases()
    torch.save([{**given, "section": section} for section in made.values()], tmp_path / "cases.pt")
    script = Path(__file__).with_name("peer_compression.py")
    done = subprocess.run(
        [PEER, str(script), "cases.pt", "results.pt"],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for (name, section), wanted in zip(made.items(), torch.load(tmp_path / "results.pt"), strict=True):
        config = {"compression_training": section}
        model = init_compression(model_of(values), config)
        outputs = outputs_of(given, model)
        redundancy_clean(model, config)
        state = {key: value for key, value in model.state_dict().items() if not key.endswith("pruning_step")}
        apart = [(one - other).abs().max().item() for one, other in zip(outputs, wanted["outputs"], strict=True)]
        print(name, apart)
        assert max(apart) <= 1e-5, (name, apart)
        for key, value in wanted["state"].items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=2e-6, msg=f"{name} {key}")


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("levels", ["deepspeed", "compressed-tensors"])
@pytest.mark.parametrize("bits", [8, 4])
def test_training_rounds_to_the_numbers_that_packing_takes(bits: int, levels: Levels, seed: int | None) -> None:
    """The fused pass of training, and scales and codes by themselves: equal bits, also for groups of zeros, of tiny
    numbers and of NaN."""
    rows = torch.randn(9, 37, generator=torch.Generator().manual_seed(1)) * torch.logspace(-44, 30, 9).view(9, 1)
    rows[3], rows[5, 7] = 0.0, torch.nan
    grid = rows_grid(rows, bits, levels, is_symmetric=True)
    packed = codes_on(rows, grid, seed, 11) * grid.scales
    trained = quantize_rows(rows, bits, levels=levels, is_symmetric=True, seed=seed, offset=11)
    assert torch.equal(trained.nan_to_num(nan=7e33), packed.nan_to_num(nan=7e33)), (trained, packed)
    assert trained[5].isnan().all() and trained[3].eq(0).all() and trained[0].eq(0).all()
    assert trained[1].isfinite().all() and trained[8].ne(0).any()
