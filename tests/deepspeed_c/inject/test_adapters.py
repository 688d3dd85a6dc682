"""LoRA adapters of peft on cut models: they are trained, saved and merged as in one plain peft process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError
from deepspeed_c.inject import cut_model
from tests.deepspeed_c.inject.families import VOCAB, feed, make
from tests.ranks import run_ranks
from tests.training import config, descend, engine_of, update

PRELOAD = "tests.deepspeed_c.inject.preload"
STEPS, LR = 3, 0.3
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# family, ranks, stages, arguments of LoRA. The factors begin random: with B = 0 the gradient of A would be 0 for every
# cut.
CASES: dict[str, tuple[str, int, list[int], dict[str, Any]]] = {
    "all linear layers": ("llama", 2, [0, 1, 2, 3], {"target_modules": "all-linear"}),
    "attention": ("llama_tied_shared", 3, [0, 2, 3], {"target_modules": ATTENTION, "bias": "lora_only", "use_rslora": True}),
    "two of attention": (
        *("llama", 3, [1, 3]),
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"], "lora_bias": True},
    ),
    "one layer of two": ("qwen2", 2, [1], {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1], "bias": "all"}),
    "fused thirds": ("gpt2", 3, [1, 3], {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "bias": "all"}),
    "fused heads": ("falcon", 2, [1], {"target_modules": ["query_key_value", "dense"]}),
    "words": ("llama", 2, [1, 3], {"target_modules": ["embed_tokens", "lm_head", "down_proj"]}),
}  # fmt: skip


def adapt(family: str, options: dict[str, Any]) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    model = make(family).train()
    if "bias" in options:  # biases of zero would test nothing
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name.endswith("bias"):
                    param.normal_(0, 0.1)
    options = {"r": 3, "lora_alpha": 2, "task_type": "CAUSAL_LM", "init_lora_weights": False, **options}
    torch.manual_seed(21)
    return get_peft_model(model, LoraConfig(**options)).train()


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def plain(family: str, options: dict[str, Any]) -> tuple[torch.nn.Module, list[float]]:
    model = adapt(family, options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = [descend(optimizer, model(**batch(step)).loss) for step in range(STEPS)]
    return model, losses


def body(rank: int, world: int, case: str, folder: str) -> list[tuple]:
    family, _, stages, options = CASES[case]
    found = []
    for stage in stages:
        zero = {"stage3_param_persistence_threshold": 20}
        settings = config(
            stage, rows=2, lr=LR, zero=zero, gradient_clipping=0.0, tensor_parallel={"autotp_size": world}
        )
        with engine_of(adapt(family, options), settings) as engine:
            losses = [update(engine, engine(**batch(step)).loss) for step in range(STEPS)]
            cut = {name for name, p in engine.module.named_parameters() if getattr(p, "tp_cut", None) is not None}
            state = engine._consolidated_16bit_state_dict()
            if stage == 3:
                if rank == 0:
                    engine.module.save_pretrained(f"{folder}/{stage}", state_dict=state)
            else:
                engine.module.save_pretrained(f"{folder}/{stage}")
            found.append((state, losses, sum("lora" in name for name in cut)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_cut_model_trains_its_adapters_as_one_process(tmp_path, case: str) -> None:
    from peft import PeftModel

    family, world, stages, options = CASES[case]
    model, losses = plain(family, options)
    start = adapt(family, options)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    moved = {name: (p - start.get_parameter(name)).abs().max().item() for name, p in model.named_parameters()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    # The bias of a key shifts all scores of a query alike, so it gets no gradient.
    still = [
        name for name in trained if moved[name] < 1e-6 and not name.endswith(("k_proj.base_layer.bias", "k_proj.bias"))
    ]
    assert trained and not still, still
    for of_rank in run_ranks(world, body, case, str(tmp_path), preload=PRELOAD):
        for stage, (got, got_losses, n_cut) in zip(stages, of_rank, strict=True):
            assert n_cut >= 2, n_cut
            torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=0, msg=f"{stage=} {got_losses} {losses}")
            for name, value in weights.items() if got is not None else ():
                error = (got[name] - value).abs().max().item()
                assert error < 1e-3 * moved[name] + 1e-6, (stage, name, error, moved[name])
    expected = model.eval()(input_ids=feed("llama")["input_ids"]).logits
    base = start.unload() if options.get("bias", "none") == "none" else adapt(family, options).unload()
    for stage in stages:
        read = PeftModel.from_pretrained(copy.deepcopy(base), f"{tmp_path}/{stage}").eval()
        error = (read(input_ids=feed("llama")["input_ids"]).logits - expected).abs().max().item()
        assert error < 1e-3, (stage, error)


def merge(rank: int, world: int, folder: str) -> list[float]:
    errors = []
    ids = feed("llama")["input_ids"]
    for family, options in (
        ("llama", {"target_modules": "all-linear"}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ):
        whole, cut = (adapt(family, options).eval() for _ in range(2))
        cut_model(cut, TensorParallel(), Collectives())
        for model in (whole, cut):
            with model.disable_adapter():
                model.off = model(input_ids=ids).logits
        errors.append((whole.off - cut.off).abs().max().item())
        whole.merge_adapter(), cut.merge_adapter()
        errors.append((whole(input_ids=ids).logits - cut(input_ids=ids).logits).abs().max().item())
        whole.unmerge_adapter(), cut.unmerge_adapter()
        errors.append((whole(input_ids=ids).logits - cut(input_ids=ids).logits).abs().max().item())
        whole, cut = whole.merge_and_unload(), cut.merge_and_unload()
        errors.append((whole(input_ids=ids).logits - cut(input_ids=ids).logits).abs().max().item())
        cut.save_pretrained(f"{folder}/{family}")
        Collectives().barrier()
        read = type(whole).from_pretrained(f"{folder}/{family}").eval()
        errors.append((whole(input_ids=ids).logits - read(input_ids=ids).logits).abs().max().item())
    return errors


def test_merged_switched_off_and_saved_whole(tmp_path) -> None:
    for errors in run_ranks(3, merge, str(tmp_path), preload=PRELOAD):
        assert max(errors) < 1e-4, errors


def refuse(rank: int, world: int) -> dict[str, tuple[str, bool]]:
    from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

    lora = {"r": 3, "task_type": "CAUSAL_LM"}
    ways = {
        "DoRA": (LoraConfig(**lora, target_modules=["q_proj"], use_dora=True), {}),
        "IA3": (IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), {}),
        "prefixes": (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), {}),
        "own tokens": (LoraConfig(**lora, target_modules=["q_proj"]), {"sequence_parallel_norms": True}),
    }  # fmt: skip
    found = {}
    for name, (adapter, more) in ways.items():
        model = get_peft_model(make("llama"), adapter)
        before = copy.deepcopy(model.state_dict())
        kinds = [type(module) for module in model.modules()]
        try:
            cut_model(model, TensorParallel(**more), Collectives())
            text = "nothing was said"
        except ModelError as error:
            text = str(error)
        after = model.state_dict()
        same = kinds == [type(module) for module in model.modules()]
        found[name] = text, same and all(torch.equal(after[key], value) for key, value in before.items())
    return found


def test_an_adapter_that_cannot_be_cut_is_refused_before_anything_changes() -> None:
    parts = {
        "DoRA": ("DoRA", "whole weight", "q_proj"),
        "IA3": ("ia3", "cannot be cut"),
        "prefixes": ("PREFIX",),
        "own tokens": ("whole tokens",),
    }
    for found in run_ranks(2, refuse, preload=PRELOAD):
        assert found.keys() == parts.keys()
        for name, (text, same) in found.items():
            assert same and all(part.lower() in text.lower() for part in (*parts[name], "Fix: ")), (name, text, same)


def drop(rank: int, world: int, recompute: bool) -> tuple:
    from deepspeed_c.inject.dropout import PartDropout, WholeDropout

    model = make("llama")
    model.config.attention_dropout = 0.3
    model = type(model)(model.config)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(21)
    options = {"r": 3, "target_modules": "all-linear", "lora_dropout": 0.5, "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    model.config._attn_implementation = "eager"
    with engine_of(model, config(rows=2, lr=LR, tensor_parallel={"autotp_size": world})) as engine:
        masks: dict[str, bytes] = {}
        for name, module in engine.module.named_modules():
            if isinstance(module, (WholeDropout, PartDropout)):
                kind = "part" if isinstance(module, PartDropout) else "whole"
                module.register_forward_hook(
                    lambda module, args, y, key=f"{kind} {name}": masks.__setitem__(key, (y == 0).numpy().tobytes())
                )
        torch.manual_seed(5)
        for step in range(2):  # the step refuses ranks whose uncut factors differ
            loss = engine(**batch(step)).loss
            update(engine, loss)
        whole = {n: p.detach().numpy().tobytes() for n, p in model.named_parameters() if not p.tensor_model_parallel}
        return masks, torch.rand(3).tolist(), loss.item(), whole


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_before_a_factor_is_alike_on_whole_inputs_and_apart_on_parts(recompute: bool) -> None:
    first, second = run_ranks(2, drop, recompute, preload=PRELOAD)
    assert len(first[0]) == 14 and first[0].keys() == second[0].keys(), sorted(first[0])
    for name, mask in first[0].items():
        assert (mask == second[0][name]) == name.startswith("whole"), name
    assert first[1:3] == second[1:3], (first[1:3], second[1:3])
    assert len(first[3]) > 14 and first[3] == second[3]
