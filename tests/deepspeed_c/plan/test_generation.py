"""``deepspeed_c plan --generate``: predicted peaks of ``generate`` between steps agree with those of engines within 5 %,
the bytes of keys and values with a formula, and bad input is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import deepspeed_c
from deepspeed_c.config import load_config
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.launcher.main import main
from deepspeed_c.plan.generation import GenerationMoment, GenerationShape, trace_generation
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.plan.memory import GATHERED
from deepspeed_c.plan.table import as_json, as_text, plan_table
from deepspeed_c.zero.weights.drivers.lease import Lease
from tests.cells import cells, every
from tests.deepspeed_c.plan.families import FAMILIES
from tests.deepspeed_c.plan.families import make as make_family
from tests.deepspeed_c.plan.test_memory import TOLERANCE, config, live_bytes

transformers = pytest.importorskip("transformers")

N_WORDS, N_LAYERS, N_POSITIONS = 1009, 4, 256
COMMON = {
    "vocab_size": N_WORDS, "num_hidden_layers": N_LAYERS, "max_position_embeddings": N_POSITIONS, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
LLAMA = {"hidden_size": 192, "intermediate_size": 517, "num_attention_heads": 6, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama of wide heads, tied": ("Llama", {**LLAMA, "head_dim": 48, "tie_word_embeddings": True}),
    "mistral of a window": ("Mistral", {**LLAMA, "sliding_window": 17}),
    "opt": ("OPT", {"hidden_size": 192, "ffn_dim": 768, "num_attention_heads": 6, "word_embed_proj_dim": 192}),
}
MODELS["opt, not tied"] = ("OPT", {**MODELS["opt"][1], "tie_word_embeddings": False})


def make(name: str) -> Any:
    family, settings = MODELS[name]
    made = getattr(transformers, f"{family}Config")(**COMMON, **settings)
    return getattr(transformers, f"{family}ForCausalLM")(made)


class Case(NamedTuple):
    """A model, a configuration, and what it generates."""

    model: str
    config: dict[str, Any]
    shape: GenerationShape


BUCKETS = {"reduce_bucket_size": 1 << 18}
# Norms are registered after the layers that use them first, so several buckets collect at a time, and the plan has one.
SMALL_BUCKETS = {"reduce_bucket_size": 1 << 14}
SMALL_UNITS = {**BUCKETS, "stage3_param_persistence_threshold": 1000}
SHM = {"local": "shm"}
CASES = {
    "stage 0": Case("llama", config(0), GenerationShape(5, 67, 11)),
    "stage 2": Case("opt, not tied", config(2, zero=SMALL_BUCKETS), GenerationShape(32, 1, 23)),
    "stage 1, fp32, one new token": Case("llama", config(1, precision="fp32"), GenerationShape(3, 101, 1)),
    "stage 3, a lease": Case("llama of wide heads, tied", config(3, zero=SMALL_UNITS), GenerationShape(7, 31, 13)),
    "stage 3, too large for a lease": Case(
        "llama", config(3, zero={**SMALL_UNITS, "stage3_max_live_parameters": 500_000}), GenerationShape(7, 31, 13)
    ),
    "stage 3, shared memory, a lease": Case("opt", config(3, zero=SMALL_UNITS, comm=SHM), GenerationShape(32, 1, 23)),
    "stage 3, joint memory": Case(
        "llama", config(3, zero=SMALL_UNITS, comm={**SHM, "zero_copy_gather": True}), GenerationShape(7, 31, 13)
    ),
    "stage 3, a window": Case("mistral of a window", config(3, zero=SMALL_UNITS), GenerationShape(7, 59, 13)),
}


def run_engine(rank: int, world: int, case: Case) -> tuple[dict[str, int], int]:
    """(the peak of each phase, calls that had a lease) of training with generation between the steps."""
    n_samples, n_prompt, n_new = case.shape
    n_leases = 0
    with live_bytes() as live:
        with live.phase("initialize"):
            engine, *_ = deepspeed_c.initialize(model=make(case.model), config=case.config)
        prompts = torch.randint(1, N_WORDS, (n_samples, n_prompt))
        mask = torch.ones_like(prompts)
        mask[0, : n_prompt // 2] = 0
        for _ in range(3):
            ids = torch.tensor([[3, 7]])
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            with live.phase("step"):
                engine.step()
            engine.eval()
            with live.phase("generate"):
                made = engine.module.generate(prompts, attention_mask=mask, max_new_tokens=n_new, **SAMPLED)
            assert made.shape == (n_samples, n_prompt + n_new), made.shape
            fetcher = engine.optimizer.fetcher
            n_leases += fetcher is not None and fetcher.drivers.of(Lease).is_held
            engine.train()
    return live.peaks, n_leases


@pytest.mark.parametrize("name", every(2, CASES))
def test_generation_is_planned_as_it_runs(run_ranks, name):
    case = CASES[name]
    with torch.device("meta"):
        model = make(case.model)
    table = plan_table(case.config, 2, model=model, generates=case.shape)
    plan = table.rows[table.chosen].plan
    measured = run_ranks(2, run_engine, case)
    lines = [f"{name}: MB planned, measured on each rank"]
    # Each rank also maps the slices of the other ranks in joint memory, which is counted where they hold it.
    is_joint = plan.lease is not None and not plan.lease.nbytes
    mapped = 2 * plan.lease.elems if is_joint else 0
    ratios = []
    for phase in ("step", "generate"):
        nbytes, peaks = plan.phases[phase].nbytes, [peaks[phase] - mapped for peaks, _ in measured]
        ratios.append(nbytes / max(peaks))
        lines.append(f"  {phase:10s} {nbytes / 1e6:8.2f} {[round(peak / 1e6, 2) for peak in peaks]} {ratios[-1]:.3f}")
    print("\n".join(lines))
    assert all(abs(ratio - 1) <= TOLERANCE for ratio in ratios), "\n".join(lines)
    # A lease in joint memory has ended with the call.
    is_seen = plan.lease is not None and plan.lease.is_taken and not is_joint
    assert [n for _, n in measured] == [3 * is_seen] * 2, (measured, plan.lease)
    kinds = plan.phases["generate"].kinds
    if is_seen:
        assert kinds[GATHERED] >= plan.lease.nbytes, (kinds, plan.lease)


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}


def policy(model: torch.nn.Module, precision: str = "fp32") -> Precision:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    return Precision(load_config({"train_micro_batch_size_per_gpu": 1, **more}, world_size=1, batch="skip"), model)


def trace(model: torch.nn.Module, *shape: int, precision: str = "fp32") -> list[GenerationMoment]:
    return trace_generation(model, GenerationShape(*shape), policy(model, precision), "cpu")


def peak_of(model: Any, n_samples: int, n_prompt: int, n_new: int) -> int:
    """The most bytes that a call of ``generate`` takes beside the weights."""
    leaves = torch.utils._pytree.tree_leaves([vars(module) for module in model.modules()])
    prompts = torch.ones(n_samples, n_prompt, dtype=torch.int64)
    mask = torch.ones_like(prompts)
    mask[0, : n_prompt // 2] = 0
    model.generation_config.eos_token_id = None
    live = LiveBytes(without=[leaf for leaf in leaves if torch.is_tensor(leaf)])
    with torch.no_grad(), live, live.phase("generate"):
        made = model.generate(prompts, attention_mask=mask, max_new_tokens=n_new, **SAMPLED)
    assert made.shape[1] == n_new + (1 if model.config.is_encoder_decoder else n_prompt), made.shape
    return live.peaks["generate"]


@pytest.mark.parametrize(
    ("family", "shape"),
    cells((family for family in FAMILIES if family != "bert"), ((3, 67, 5), (13, 2, 11), (5, 1, 1)), at_once=1),
)
def test_each_family_takes_what_its_generate_takes(family: str, shape: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        outline = make_family(family)
    moments = trace(outline, *shape)
    assert all(param.is_meta for param in outline.parameters())
    expected, found = peak_of(make_family(family).eval(), *shape), max(moment.nbytes for moment in moments)
    print(f"{family} {shape}: {found} planned, {expected} measured, {found / expected:.3f}", moments)
    assert abs(found / expected - 1) <= TOLERANCE, (found, expected, moments)


PRECISIONS = {"fp32": 4, "bf16": 2}
GROUPED = {"hidden_size": 48, "intermediate_size": 70, "num_attention_heads": 6, "num_key_value_heads": 2}


def llama(**changes: Any) -> Any:
    settings = transformers.LlamaConfig(**{**COMMON, **GROUPED, "num_hidden_layers": 3, **changes})
    return transformers.LlamaForCausalLM(settings)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(5, 13, 7), (1, 1, 1), (7, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 6}, {"num_key_value_heads": 1, "head_dim": 20}], ids=str
)
def test_keys_and_values_are_those_of_the_formula(
    changes: dict[str, int], shape: tuple[int, int, int], precision: str
) -> None:
    n_samples, n_prompt, n_new = shape
    with torch.device("meta"):
        model = llama(**changes)
    moments = trace(model, *shape, precision=precision)
    n_heads, head_dim = changes.get("num_key_value_heads", 2), changes.get("head_dim", 8)
    # The last new token is not put into the model.
    for moment, n_tokens in zip(moments, (n_prompt, n_prompt + n_new - 1), strict=False):
        expected = n_samples * n_tokens * 3 * 2 * n_heads * head_dim * PRECISIONS[precision]
        assert moment.cache == expected, (moment, expected)
    assert len(moments) == (1 if n_new == 1 else 2)


def test_a_window_bounds_keys_and_values() -> None:
    settings = {**COMMON, **GROUPED, "num_hidden_layers": 3, "sliding_window": 9}
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**settings))
    _, last = trace(model, 5, 31, 17)
    # The forward of a token joins it to the 8 tokens of the window before it.
    assert last.cache == 5 * 9 * 3 * 2 * 2 * 8 * 4, last


def test_factors_of_lora_change_the_workspace_alone() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=5, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    with torch.device("meta"):
        models = llama(), peft.get_peft_model(llama(), settings)
    plain, wrapped = (trace(model, 3, 29, 5) for model in models)
    assert [m.cache for m in plain] == [m.cache for m in wrapped]
    found = max(moment.nbytes for moment in wrapped)
    expected = peak_of(peft.get_peft_model(llama(), settings).eval(), 3, 29, 5)
    assert abs(found / expected - 1) <= TOLERANCE, (wrapped, expected)


def test_a_model_that_keeps_nothing_runs_all_tokens_for_the_last_one() -> None:
    settings = transformers.OpenAIGPTConfig(vocab_size=101, n_positions=64, n_embd=48, n_layer=3, n_head=6)
    with torch.device("meta"):
        model = transformers.OpenAIGPTLMHeadModel(settings)
    prompts, last = trace(model, 3, 29, 11)
    assert prompts.cache == last.cache == 0 and last.workspace > prompts.workspace, (prompts, last)
    expected = peak_of(transformers.OpenAIGPTLMHeadModel(settings).eval(), 3, 29, 11)
    assert abs(last.nbytes / expected - 1) <= TOLERANCE, (last, expected)


def test_the_table_has_the_column_and_the_lease() -> None:
    with torch.device("meta"):
        model = llama()
    shape = GenerationShape(3, 29, 5)
    n_params = sum(p.numel() for p in model.parameters())
    for limit, is_taken in ((n_params, True), (1000, False)):
        zero = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": limit}
        table = plan_table(config(3, zero=zero), 2, model=model, generates=shape)
        lease = table.rows[table.chosen].plan.lease
        # Gather units are padded to whole slices, so a model of exactly the limit may be too large.
        table = plan_table(
            config(3, zero={**zero, "stage3_max_live_parameters": lease.elems - (not is_taken)}),
            2,
            model=model,
            generates=shape,
        )
        lease = table.rows[table.chosen].plan.lease
        assert lease.is_taken == is_taken and n_params <= lease.elems < n_params + 4096, (lease, n_params)
        text, found = as_text(table), as_json(table)
        assert (
            "a lease gathers all weights once" if is_taken else "no lease, each forward gathers (join mode)"
        ) in text, text
        assert f"{lease.elems}" in text and "keys and values" in text and "a forward of" in text, text
        assert found["generation"]["n_samples"] == 3 and len(found["generation"]["forwards"]) == 2
        chosen = next(row for row in found["rows"] if row["is_chosen"])
        assert chosen["lease"] == lease._asdict()
        assert chosen["phases"]["generate"]["bytes"] == table.rows[table.chosen].plan.phases["generate"].nbytes
    without = plan_table(config(3), 2, model=model)
    assert "generate" not in as_text(without) and as_json(without)["generation"] is None


def test_generation_leaves_the_figures_of_training_as_they_are() -> None:
    with torch.device("meta"):
        model = llama()
    for stage in (0, 1, 2):
        alone = plan_table(config(stage), 2, model=model)
        beside = plan_table(config(stage), 2, model=model, generates=GenerationShape(3, 29, 5))
        for row, other in zip(alone.rows, beside.rows, strict=True):
            phases = {name: phase for name, phase in other.plan.phases.items() if name != "generate"}
            assert row.plan.phases == phases, (row, other)


SCRIPT = """
import transformers, deepspeed_c
settings = transformers.{family}Config(vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
    intermediate_size=70, max_position_embeddings=64)
deepspeed_c.initialize(model=transformers.{model}(settings), config={{
    "train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}}})
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "llama.py").write_text(SCRIPT.format(family="Llama", model="LlamaForCausalLM"))
    (tmp_path / "bert.py").write_text(SCRIPT.format(family="Bert", model="BertForMaskedLM"))
    (tmp_path / "ds.json").write_text("{}")
    return tmp_path


def test_the_command_prints_what_generation_takes(folder, capsys):
    words = ["plan", "--ranks", "2", "--device", "cpu", "--generate", "3x29x5"]
    assert main([*words, str(folder / "llama.py")]) == 0
    out = capsys.readouterr().out
    assert "generate with 3 prompts of 29 tokens, 5 new tokens each" in out and "weights are whole" in out, out
    assert main([*words, "--batch", "2", "--seq", "7", str(folder / "llama.py")]) == 0
    out = capsys.readouterr().out
    assert "the last token" in out and "activations of 2 samples of 7 tokens" in out.replace("of of", "of"), out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--generate", "3x29", "{folder}/llama.py"], "'3x29' is not understood"),
        (["--generate", "0x29x5", "{folder}/llama.py"], "'0' is no number > 0"),
        (["--generate", "3x-1x5", "{folder}/llama.py"], "'-1' is no number > 0"),
        (["--generate", "3x60x5", "{folder}/llama.py"], "65 tokens are more than the 64 positions"),
        (["--generate", "3x29x5", "{folder}/bert.py"], "no model of transformers in it that generates text"),
        (["--generate", "3x29x5", "--config", "{folder}/ds.json", "--params", "1e6"], "sizes alone do not say"),
        (["--generate", "3x29x5", "--inference", "{folder}"], "does not go with --generate"),
    ],
)
def test_wrong_calls(folder, capsys, words, message):
    assert main(["plan", *(word.format(folder=folder) for word in words)]) == 2
    said = capsys.readouterr().err
    assert message in said and "Fix: " in said, said


def test_models_that_cannot_be_traced_are_refused():
    class Alone(torch.nn.Linear):
        def generate(self) -> None:
            """Makes something of its own."""

    with torch.device("meta"):
        alone, reader = Alone(3, 3), llama()
    with pytest.raises(ModelError, match="Alone has no model of transformers"):
        trace(alone, 1, 2, 3)
    reader.model.layers[0].register_forward_pre_hook(lambda module, args: bool(args[0].sum() > 0) and None)
    with pytest.raises(ModelError, match="fails on tensors without data"):
        trace(reader, 1, 2, 3)
    with pytest.raises(ConfigError, match="more than the 256 positions"):
        trace(reader, 1, 200, 57)
