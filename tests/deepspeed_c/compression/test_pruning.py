"""Pruning (deepspeed_c/compression/pruning.py) and smaller layers (shrink.py): training at each ZeRO stage on two ranks
against masks written in plain Python, a resumed schedule, cleaned models, models of transformers, and wrong inputs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed_c
from deepspeed_c.compression.basic_layer import CompressedLayer
from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.errors import ConfigError, DeepSpeedCError, ModelError, StateError, UnsupportedConfigError
from tests.deepspeed_c.compression.oracle import batch, compressed_engine, loss_of, rounded, train, weights_of
from tests.log_lines import LogLines
from tests.ranks import run_ranks

N_STEPS, HEADS, WIDTH = 5, 4, 8


class Block(nn.Module):
    """A language model of one attention and one MLP."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(12, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 12)
        with torch.no_grad():
            self.up.weight[3] = 0  # a row of zeros
            self.up.weight[1] = self.up.weight[2] = -self.up.weight[0]  # rows of equal magnitude

    def layer(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        q, k, v = (self.layer(n, x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for n in "qkv")
        x = x + self.layer("o", ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.layer("down", nn.functional.gelu(self.layer("up", x))))


def ones_of_largest(values: list[float], n: int) -> list[float]:
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]
    return [float(i in best) for i in range(len(values))]


def mask_of(values: Tensor, density: float, pattern: int = 0) -> Tensor:
    flat = values.detach().float().flatten().tolist()
    size = pattern or len(flat)
    n = pattern // 2 if pattern else math.ceil(density * len(flat))
    ones = [one for i in range(0, len(flat), size) for one in ones_of_largest(flat[i : i + size], n)]
    return torch.tensor(ones).view(values.shape)


def straight_through(scores: Tensor, density: float, pattern: int = 0) -> Tensor:
    return scores + (mask_of(scores, density, pattern) - scores).detach()


class Theory(Block):
    """The block with the masks of ``SECTIONS[name]``."""

    def __init__(self, name: str, scores: dict[str, Tensor]) -> None:
        super().__init__()
        self.name, self.step, self.made = name, 0, {}
        self.scores = nn.ParameterDict({key.replace(".", "/"): value.clone() for key, value in scores.items()})

    def magnitudes(self, name: str, values: Tensor, first: int, last: int, stride: int, final: float) -> Tensor:
        """The mask, made again at steps first, first + stride, ..., last."""
        step = self.step
        if step == first or step == last or (first < step < last and (step - first) % stride == 0):
            left = max(last - step, 0) / max(last - first, 1)
            self.made[name] = mask_of(values, final + (1 - final) * left**3)
        return self.made.get(name, torch.ones(()))

    def layer(self, name: str, x: Tensor) -> Tensor:
        plain = getattr(self, name)
        weight, bias, step = plain.weight, plain.bias, self.step
        if self.name == "magnitudes":
            trained = weight
            if name == "up" and step >= 2:  # a mask does not change the scales
                weight = rounded(weight.view(WIDTH * 12 // 4, 4), 8).view(weight.shape)
            if name in ("q", "down"):
                weight = weight * self.magnitudes(name, trained.abs(), 0, 3, 2, 0.3)
            if name == "up" and step >= 1:
                mask = self.magnitudes(name, trained.abs().sum(1), 1, 1, 1, 0.5)
                weight, bias = weight * mask[:, None], bias * mask
            if name == "o" and step >= 2:
                sums = trained.abs().unflatten(1, (HEADS, -1)).sum((0, 2))
                weight = weight * self.magnitudes(name, sums, 2, 2, 1, 0.5).repeat_interleave(2)
        else:
            if name == "up":
                weight = weight * straight_through(self.scores["up/sparse_mask_scores"], 0.5, 4)
            if name == "down" and step >= 2:
                mask = straight_through(self.scores["down/row_mask_scores"], 0.5)
                weight, bias = weight * mask, bias * mask[:, 0]
            if name == "o" and step >= 1:
                weight = weight * straight_through(self.scores["o/head_pruning_scores"], 0.5).repeat_interleave(2, 1)
        return nn.functional.linear(x, weight, bias)


def technique(ratio: float | None, modules: list[str], related: Any = None, offset: int = 0, **shared: Any) -> dict:
    group = {"params": {} if ratio is None else {"dense_ratio": ratio}, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": offset, **shared},
        "different_groups": {"g": group},
    }


BITS = {
    "shared_parameters": {
        "enabled": True,
        "quantize_weight_in_forward": True,
        "quantize_groups": 24,
        "schedule_offset": 2,
    },
    "different_groups": {"g": {"params": {"target_bits": 8}, "modules": ["^up$"]}},
}
ATTENTION = (["^o$"], [["^q$", "^k$", "^v$"]])
SECTIONS = {
    "magnitudes": {
        "sparse_pruning": technique(
            0.3, ["^q$", "down"], gradual=True, schedule_offset_end=3, schedule_offset_stride=2
        ),
        "row_pruning": technique(0.5, ["up"], [["down"]], offset=1),
        "head_pruning": technique(0.5, *ATTENTION, offset=2, method="l1", num_heads=HEADS),
        "weight_quantization": BITS,
    },
    "scores": {
        "sparse_pruning": technique(None, ["up"], method="topk", block_pattern="2:4"),
        "row_pruning": technique(0.5, ["down"], offset=2, method="topk"),
        "head_pruning": technique(0.5, *ATTENTION, offset=1, num_heads=HEADS),
    },
}


def config_of(name: str, stage: int = 0, dtype: str = "fp32") -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bf16"},
        "compression_training": copy.deepcopy(SECTIONS[name]),
    }


def theory(name: str, n_steps: int = N_STEPS) -> tuple[list[float], dict[str, Tensor]]:
    compressed = init_compression(Block(), config_of(name))
    scores = {key: value for key, value in compressed.named_parameters() if key.endswith("scores")}
    model, losses = Theory(name, scores), []
    for model.step in range(n_steps):
        words = batch(model.step)
        loss = loss_of(model(words), words)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.5 * param.grad / max(norm.item(), 1.0)
        losses.append(loss.item())
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return losses, {key.removeprefix("scores.").replace("/", "."): value for key, value in weights.items()}


# The resumed runs below train both sections at stages 1 and 3.
CELLS = [(0, "fp32", "scores"), (1, "fp32", "magnitudes"), (2, "bf16", "scores"), (3, "fp32", "magnitudes")]


def cells_body(rank: int, world: int) -> list:
    found = []
    for stage, dtype, name in CELLS:
        config = config_of(name, stage, dtype)
        engine = compressed_engine(Block(), config)
        losses, state = train(engine, rank, world, range(N_STEPS)), weights_of(engine)
        engine.eval()
        before = engine(batch(9)).float()
        if stage == 3:
            with pytest.raises(StateError, match="its weight is sharded, and cannot get smaller"):
                redundancy_clean(engine, config)
            for each in config["compression_training"].values():
                each["different_groups"]["g"].pop("related_modules", None)
        redundancy_clean(engine, config)
        after = engine(batch(9)).float()
        shapes = {n: tuple(getattr(engine.module, n).weight.shape) for n in ("q", "k", "v", "o", "up", "down")}
        is_plain = not any(isinstance(m, CompressedLayer) for m in engine.module.modules())
        apart = (after - before).abs().max().item()
        found.append({"losses": losses, "state": state, "apart": apart, "shapes": shapes, "plain": is_plain})
        engine.destroy()
    return found


def test_each_technique_at_each_stage_is_the_formula_and_cleaning_keeps_the_outputs():
    everyone = run_ranks(2, cells_body)
    expected = {name: theory(name) for name in SECTIONS}
    attention = {**dict.fromkeys("qkv", (4, 8)), "o": (8, 4)}
    small = {"magnitudes": {"up": (6, 8), "down": (8, 6), **attention}, "scores": attention}
    for cell, one, other in zip(CELLS, *everyone, strict=True):
        stage, dtype, name = cell
        mean = [(a + b) / 2 for a, b in zip(one["losses"], other["losses"], strict=True)]
        wanted, weights = expected[name]
        print(cell, mean, wanted, one["apart"], one["shapes"])
        # bf16 scores and magnitudes may tie or change places, so that its masks are compared in fp32 only.
        tolerance = 1e-5 if dtype == "fp32" else 0.1
        assert mean == pytest.approx(wanted, abs=tolerance), cell
        for key, weight in weights.items() if dtype == "fp32" else ():
            torch.testing.assert_close(one["state"][key], weight, rtol=0, atol=1e-5, msg=f"{cell} {key}")
        assert set(one["state"]) - set(weights) == {
            f"{layer}.{kind}_pruning_{what}"
            for layer, kind in (("q", "sparse"), ("down", "sparse"), ("up", "row"), ("o", "head"))
            for what in ("mask", "step")
            if name == "magnitudes"
        }
        for key, value in one["state"].items():
            assert torch.equal(value, other["state"][key]), (cell, key)
        limit = 1e-6 if dtype == "fp32" else 0.02
        assert one["apart"] <= limit and other["apart"] <= limit and one["plain"], (cell, one["apart"], other["apart"])
        for layer, shape in small[name].items() if stage < 3 else ():
            assert one["shapes"][layer] == shape, (cell, layer)


def sharded_body(rank: int, world: int, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    engine = compressed_engine(Block(), config_of(name, 3))
    train(engine, rank, world, range(N_STEPS))
    out, state = engine.eval()(batch(9)).detach().clone(), weights_of(engine)
    engine.destroy()
    return out, state


@pytest.mark.parametrize("name", SECTIONS)
def test_weights_of_stage_3_are_cleaned_in_a_new_model_of_another_schedule(name: str):
    (wanted, state), _ = run_ranks(2, sharded_body, name)
    late, config = config_of(name), config_of(name)
    for each in config["compression_training"].values():
        each["shared_parameters"]["schedule_offset"] = 0
    for each in (late, config):
        model = init_compression(Block(), each).eval()
        model.load_state_dict(state)
        if each is late:
            with pytest.raises(StateError, match='this is step 0[^$]*write "schedule_offset": 0'):
                redundancy_clean(model, each)
            continue
        redundancy_clean(model, each)
        print(model)
        torch.testing.assert_close(model(batch(9)), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("gradual", [False, True])
def test_an_end_of_the_schedule_counts_for_gradual_pruning_only(gradual: bool, method: str):
    """DeepSpeed's masks of magnitudes and scores have the full ratio at schedule_offset, whatever the end."""
    shared = {"method": method, "schedule_offset_end": 10**6, "schedule_offset_stride": 3}
    section = technique(0.25, ["up"], offset=1, gradual=gradual, **shared)
    model = init_compression(Block(), {"compression_training": {"sparse_pruning": section}})
    kept = []
    for _ in range(3):
        kept.append(model.up.kept().float().mean().item())
        model.up.quantization.steps.advance()
    print(gradual, method, kept)
    assert kept == ([1, 1, 1] if gradual else [1, 0.25, 0.25])


def saved_body(rank: int, world: int, folder: str) -> dict:
    found = {}
    for name in SECTIONS:
        engine = compressed_engine(Block(), config_of(name, 1))
        train(engine, rank, world, range(2))
        engine.save_checkpoint(f"{folder}/{name}")
        found[name] = train(engine, rank, world, range(2, 5)), weights_of(engine)
        engine.destroy()
    with pytest.raises(ConfigError, match="asks for compression, and no layer of the model is compressed"):
        deepspeed_c.initialize(model=Block(), config=config_of("scores"))
    return found


def resumed_body(rank: int, world: int, folder: str) -> dict:
    found = {}
    for name in SECTIONS:
        engine = compressed_engine(Block(), config_of(name, 3))
        assert engine.load_checkpoint(f"{folder}/{name}")[0] is not None
        found[name] = train(engine, rank, world, range(2, 5)), weights_of(engine)
        engine.destroy()
    return found


def test_a_run_that_stops_between_two_prunings_goes_on_with_its_masks_on_more_ranks(tmp_path: Path):
    (alone,) = run_ranks(1, saved_body, str(tmp_path))
    one, other = run_ranks(2, resumed_body, str(tmp_path))
    for name, (wanted, state) in alone.items():
        mean = [(a + b) / 2 for a, b in zip(one[name][0], other[name][0], strict=True)]
        print(name, mean, wanted)
        assert mean == pytest.approx(wanted, abs=1e-5)
        for key, value in state.items():
            torch.testing.assert_close(one[name][1][key], value, rtol=0, atol=1e-5, msg=f"{name} {key}")


def test_two_patterns_each_cut_their_own_related_modules_and_a_plain_state_dict_loads():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block(hidden=20)

    model = Two()
    with torch.no_grad():
        model.second.up.weight *= torch.randn(20, 1)
    plain = copy.deepcopy(model.state_dict())
    related = technique(0.25, ["first.up", "second.up"], [["first.down"], ["second.down"]])
    config = {"compression_training": {"row_pruning": related}}
    assert init_compression(model, config).load_state_dict(plain).missing_keys == []
    before = [block(batch(1)) for block in (model.first, model.second)]
    redundancy_clean(model, config)
    after = [block(batch(1)) for block in (model.first, model.second)]
    assert (model.first.up.out_features, model.first.down.in_features) == (3, 3)
    assert (model.second.up.out_features, model.second.down.in_features) == (5, 5)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


GATED = [["gate_proj", "down_proj"]]


@pytest.mark.parametrize(
    ("family", "modules", "related", "n_layers", "width"),
    [
        ("Llama", ["up_proj"], GATED, 2, 6),
        ("Llama", ["gate_proj"], [["up_proj", "down_proj"]], 2, 6),
        ("Llama", [r"1\.mlp\.up_proj"], [[r"1\.mlp\.gate_proj", r"1\.mlp\.down_proj"]], 1, 20),  # the other layer stays
        ("OPT", ["fc1"], [["fc2"]], 2, 6),
        ("GPTNeo", ["c_fc"], [["mlp.c_proj"]], 2, 6),  # its configuration says None: 4 times the width of the model
        ("Bert", ["intermediate.dense"], [[r"\d\.output.dense"]], 2, 6),
    ],
)
def test_models_of_transformers_run_and_are_saved_with_smaller_mlps(
    family: str, modules: list[str], related: Any, n_layers: int, width: int, tmp_path: Path
):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    n_rows = 4 * 16 if family == "GPTNeo" else 20
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2}
    own = {
        "Llama": {"intermediate_size": n_rows, "num_hidden_layers": 2},
        "OPT": {"ffn_dim": n_rows, "num_hidden_layers": 2, "word_embed_proj_dim": 16},
        "GPTNeo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
        "Bert": {"intermediate_size": n_rows, "num_hidden_layers": 2},
    }
    kind = getattr(transformers, f"{family}{'ForMaskedLM' if family == 'Bert' else 'ForCausalLM'}")
    model = kind(getattr(transformers, f"{family}Config")(**sizes, **own[family])).eval()
    words = batch(2) % 31
    ratio = 6 / n_rows
    config = {"compression_training": {"row_pruning": technique(ratio, modules, related)}}
    init_compression(model, config)
    before, n_before = model(words).logits, sum(param.numel() for param in model.parameters())
    redundancy_clean(model, config)
    after, n_after = model(words).logits, sum(param.numel() for param in model.parameters())
    print((after - before).abs().max(), n_before, n_after, model.config)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    has_bias, n_first = family != "Llama", 2 if family == "Llama" else 1
    assert n_before - n_after == n_layers * (n_rows - 6) * (16 * (n_first + 1) + has_bias)
    names = ("intermediate_size", "ffn_dim")
    assert width in [getattr(model.config, name, None) for name in names]
    if n_layers == 2:
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(kind.from_pretrained(tmp_path).eval()(words).logits, after, rtol=0, atol=1e-5)


def test_a_layer_that_a_gated_mlp_multiplies_is_missed():
    for related, is_told in (([["down"]], True), ([["gate", "down"]], False)):
        with LogLines() as log:
            init_compression(Gated(), {"compression_training": {"row_pruning": technique(0.5, ["up"], related)}})
        print(log.lines)
        assert any("rows of up will go, and gate has the same shape" in line for line in log.lines) == is_told


def test_a_model_of_transformers_runs_with_fewer_heads_and_is_saved_with_them(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    shape = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model, words = transformers.LlamaForCausalLM(shape).eval(), batch(2) % 31
    related = [["q_proj", "k_proj", "v_proj"]]
    config = {"compression_training": {"head_pruning": technique(0.5, ["o_proj"], related, num_heads=4)}}
    with pytest.raises(ConfigError, match="4 blocks of heads do not divide num_key_value_heads = 2 of LlamaAttention"):
        init_compression(model, config)
    config["compression_training"]["head_pruning"]["shared_parameters"]["num_heads"] = 2
    n_before = sum(param.numel() for param in model.parameters())
    init_compression(model, config)
    before = model(words).logits
    redundancy_clean(model, config)
    after, n_after = model(words).logits, sum(param.numel() for param in model.parameters())
    print((after - before).abs().max(), n_before, n_after, model.config)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    # Each of 2 layers loses half of the rows of q (32), k and v (16 each), and half of the columns of o, 32 wide.
    assert n_before - n_after == 2 * 32 * (16 + 8 + 8 + 16)
    found = (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim)
    assert found == (2, 1, 8)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(words).logits, after, rtol=0, atol=1e-5)


@dataclass
class Sizes:
    num_heads: int = HEADS


@dataclass(frozen=True)
class FrozenSizes:
    num_heads: int = HEADS


class OwnNumbers(nn.Module):
    """An attention that computes with its own numbers, as those of transformers do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.num_heads, self.embed_dim, self.inner_dim = config, HEADS, WIDTH, WIDTH + 1
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size = self.embed_dim // self.num_heads
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, size).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("config", "n_heads"), [(Sizes(), 2), (FrozenSizes(), 4), (None, None)])
def test_an_attention_gets_its_new_numbers_and_its_configuration_if_that_may_change(config: Any, n_heads: int | None):
    model = nn.ModuleDict({"a": OwnNumbers(config)})
    section = {"compression_training": {"head_pruning": technique(0.5, ["o$"], [["q$", "k$", "v$"]], num_heads=HEADS)}}
    init_compression(model, section)
    x = torch.randn(2, 3, WIDTH)
    before = model["a"](x)
    redundancy_clean(model, section)
    after, attention = model["a"](x), model["a"]
    print(attention, config, (after - before).abs().max())
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    assert (attention.num_heads, attention.embed_dim, attention.inner_dim) == (2, 4, WIDTH + 1)
    assert getattr(config, "num_heads", None) == n_heads
    assert (attention.q.out_features, attention.o.in_features, len(attention.k.bias)) == (4, 4, 4)


def tied() -> Block:
    model = Block()
    model.head.weight = model.table.weight
    return model


def nan_weights() -> Block:
    model = Block()
    with torch.no_grad():
        model.up.weight[1, 1] = torch.nan
    return model


def two_groups() -> dict:
    made = technique(0.5, ["^q$"])
    made["different_groups"]["h"] = {"params": {"dense_ratio": 0.5}, "modules": ["q"]}
    return made


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)


S, R, H = (f"compression_training.{kind}_pruning" for kind in ("sparse", "row", "head"))
CASES: dict[str, tuple[Any, str, dict, type[Exception], str]] = {
    "no ratio": (Block, "row", technique(None, ["up"]), ConfigError,
     rf"{R}.different_groups.g.params.dense_ratio: is missing"),
    "all": (Block, "sparse", technique(1.0, ["up"]), ConfigError,
     rf"{S}.different_groups.g.params.dense_ratio: is 1.0: nothing"),
    "none": (Block, "head", technique(0, ["^o$"], num_heads=4), ConfigError,
     rf"{H}.different_groups.g.params.dense_ratio: is 0"),
    "no groups": (Block, "row", {"shared_parameters": {"enabled": True}}, ConfigError,
     rf"{R}.different_groups: is empty"),
    "snip": (Block, "sparse", technique(0.5, ["up"], method="snip_momentum"), ConfigError,
     "method: is snip_momentum, which is not"),
    "pattern": (Block, "sparse", technique(0.5, ["up"], block_pattern="4x4"), ConfigError,
     "block_pattern: is 4x4: this pattern"),
    "4:2": (Block, "sparse", technique(0.5, ["up"], block_pattern="4:2"), ConfigError,
     "block_pattern: is 4:2: this pattern"),
    "2:4 of 0.3": (Block, "sparse", technique(0.3, ["up"], block_pattern="2:4"), ConfigError,
     "dense_ratio: is 0.3, and .* keeps 0.5"),
    "2:5": (Block, "sparse", technique(None, ["up"], block_pattern="2:5"), ConfigError,
     "block_pattern: 5 does not divide the 8"),
    "end": (Block, "sparse", technique(0.5, ["up"], offset=5, gradual=True, schedule_offset_end=4), ConfigError,
     "schedule_offset_end: is 4, before"),
    "no end": (Block, "sparse", technique(0.5, ["up"], gradual=True), ConfigError,
     "schedule_offset_end: is missing, and gradual"),
    "related of weights": (Block, "sparse", technique(0.5, ["up"], [["down"]]), ConfigError,
     "related_modules: is given, and single"),
    "no heads": (Block, "head", technique(0.5, ["^o$"]), ConfigError, rf"{H}.shared_parameters.num_heads: is missing"),
    "heads": (Block, "head", technique(0.5, ["^o$"], num_heads=3), ConfigError,
     "num_heads: 3 does not divide the 8 input columns of o"),
    "flat": (Block, "row", technique(0.5, ["up"], ["down"]), ConfigError,
     "related_modules: is no list of lists of patterns"),
    "one list": (Block, "row", technique(0.5, ["up", "^q$"], [["down"]]), ConfigError,
     "has 1 lists, and modules has 2 patterns"),
    "number": (Block, "row", technique(0.5, ["up"], [["^[qk]$"]]), ConfigError,
     "matches 2 linear layers, and 'up' of modules matches 1"),
    "size": (Block, "row", technique(0.5, ["up"], [["^q$"]]), ConfigError,
     "q has 8 input columns, and up has 12 rows"),
    "rows of heads": (Block, "head", technique(0.5, ["^o$"], [["up"]], num_heads=4), ConfigError,
     "up has 12 rows, and o has 8 input columns"),
    "gate alone": (Gated, "row", technique(0.5, ["up", "gate"], [["down"], ["down"]]), ConfigError,
     "down are cut twice[^$]*outputs are multiplied"),
    "cut twice": (Block, "row", technique(0.5, ["^q$"], [["^k$", "^k$"]]), ConfigError,
     "the columns of k are cut twice"),
    "twice": (Block, "row", two_groups(), ConfigError, "'q' matches q, which another pattern of row_pruning matches"),
    "shared weight": (tied, "row", technique(0.5, ["head"]), ModelError, "head: it shares its weight with table"),
    "NaN": (nan_weights, "sparse", technique(0.5, ["up"]), ModelError, r"up\.weight: the weight has NaN or inf"),
    "meta": (lambda: Block().to("meta"), "row", technique(0.5, ["up"]), ModelError, "up: a weight on the meta device"),
    "channels": (Block, "channel", technique(0.5, ["up"]), UnsupportedConfigError,
     "channel_pruning.* asks for channel pruning"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_named_and_changes_nothing(name: str):
    make, kind, section, error, text = CASES[name]
    model = make()
    before = [type(module) for module in model.modules()], list(model.state_dict())
    with pytest.raises(error, match=text) as raised:
        init_compression(model, {"compression_training": {f"{kind}_pruning": section}})
    print(raised.value)
    assert isinstance(raised.value, DeepSpeedCError) and raised.value.where and raised.value.fix
    assert ([type(module) for module in model.modules()], list(model.state_dict())) == before


def test_cleaning_at_the_wrong_time_changes_nothing():
    config = {"compression_training": {"sparse_pruning": technique(0.5, ["up"], offset=1)}}
    with pytest.raises(StateError, match="up: it is not pruned as the configuration says"):
        redundancy_clean(Block(), config)
    model = init_compression(Block(), config)
    with pytest.raises(StateError, match="up: its sparse pruning begins at step 1, and this is step 0"):
        redundancy_clean(model, config)
    model.up.quantization.steps.advance()
    with torch.no_grad():
        model.up.weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match=r"up\.weight: the weight has NaN or inf"):
        model(batch(0))
    config = config_of("magnitudes")
    model = init_compression(Block(), config)
    for _ in range(4):
        model.up.quantization.steps.advance()
    with pytest.raises(UnsupportedConfigError, match="layers that get smaller are not packed"):
        redundancy_clean(model, config, pack=True)
