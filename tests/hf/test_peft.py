"""peft on deepspeed_c: adapters beside frozen weights of another dtype, sharded or not.

The Trainer trains them to the same weights as without DeepSpeed.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.hf.stack import ds_config, llama, make_trainer, numbers, on_ranks


def lora(base_dtype=torch.float32):
    """Adapters in fp32 beside a frozen base in ``base_dtype``, as peft makes them."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        llama().to(base_dtype),
        LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.0,
            target_modules="all-linear",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
    )
    torch.manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape) * 0.05
    return model


def train(rank, world, folder, deepspeed, base_dtype, changes):
    from peft import get_peft_model_state_dict

    model = lora(base_dtype)
    trainer = make_trainer(folder, deepspeed, model=model, **changes)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if deepspeed is None:
        state = model.state_dict()
    else:
        state = trainer.model_wrapped.module_state_dict()
    adapters = get_peft_model_state_dict(model, state_dict=state)
    frozen = next(value for name, value in state.items() if name.endswith("q_proj.base_layer.weight"))
    files = sorted(path.name for path in (folder / "saved").iterdir()) if rank == 0 else []
    return numbers(trainer), {k: v.float().clone() for k, v in adapters.items()}, frozen.dtype, files


@pytest.mark.parametrize(
    "stage, base_dtype", [(2, torch.float32), (3, torch.float32), (2, torch.bfloat16), (3, torch.bfloat16)], ids=str
)
def test_adapters_train_as_without_deepspeed(tmp_path, stage, base_dtype):
    from safetensors.torch import load_file

    config = ds_config(stage, scheduler=False)
    found, adapters, dtype, files = on_ranks(2, train, tmp_path, config, base_dtype, {})[0]
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    expected, adapters_expected, *_ = on_ranks(2, train, tmp_path, None, base_dtype, {})[0]
    print(found, expected)
    assert dtype == base_dtype  # frozen weights have neither masters nor a cast
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(files) and "model.safetensors" not in files
    loss, weight = (2e-6, 1e-4) if base_dtype == torch.float32 else (2e-3, 1e-2)
    assert found["loss"] == pytest.approx(expected["loss"], rel=loss)
    assert adapters.keys() == adapters_expected.keys() == saved.keys()
    for name, value in adapters_expected.items():
        torch.testing.assert_close(adapters[name], value, rtol=0, atol=weight, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(saved[name].float(), adapters[name]), name


def resume(rank, world, folder, deepspeed):
    results = []
    for attempt in range(2):
        trainer = make_trainer(folder, deepspeed, model=lora(), max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if attempt else None)
        results.append(numbers(trainer))
    sizes = [path.stat().st_size for path in (folder / "checkpoint-2" / "global_step2").rglob("*") if path.is_file()]
    return results, sum(sizes)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_resumed_from_a_checkpoint_without_the_base(tmp_path, stage):
    (first, second), n_bytes = on_ranks(2, resume, tmp_path, ds_config(stage))[0]
    assert first == second and len(first["loss"]) == 4
    n_adapters = sum(p.numel() for name, p in on_ranks(1, parameters)[0] if "lora_" in name)
    n_base = sum(p.numel() for name, p in on_ranks(1, parameters)[0] if "lora_" not in name)
    # Weights, masters and two moments of the trained parameters, in fp32, plus the files' overhead.
    assert n_bytes < 4 * (4 * n_adapters + n_base / 2) + 60_000, n_bytes


def parameters(rank, world):
    return [(name, p.detach()) for name, p in lora().named_parameters()]


def load_base(rank, world, folder):
    """Loads a base model under stage 3, and makes, merges and counts adapters on it."""
    from deepspeed.zero import GatheredParameters
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.hf.stack import forget

    forget()
    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    if rank == 0:
        llama().save_pretrained(folder)
    torch.distributed.barrier()
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    )
    trained, n_all = model.get_nb_trainable_parameters()
    with GatheredParameters(list(model.parameters())):
        head = model.base_model.model.lm_head.modules_to_save["default"].weight.detach().clone()
    del config
    return trained, n_all, head


def test_adapters_on_a_base_that_was_loaded_sharded(tmp_path):
    expected = llama_counts()
    for trained, n_all, head in on_ranks(2, load_base, tmp_path):
        assert (trained, n_all) == expected
        assert torch.equal(head, on_ranks(1, plain_head)[0])


def llama_counts():
    from tests.hf.stack import VOCAB, WIDTH

    trained = 2 * 2 * (WIDTH + WIDTH) + 2 * (VOCAB + WIDTH) + VOCAB * WIDTH
    return trained, trained + sum(p.numel() for name, p in on_ranks(1, parameters)[0] if "lora_" not in name)


def plain_head(rank, world):
    return llama().lm_head.weight.detach()


ADALORA_STEPS = 5


def adapt(rank, world, zero):
    """Trains with AdaLoRA from its first importances to the last budget.

    AdaLoRA reads whole gradients and masks the trained parameters. ``zero`` is a section of the configuration; None
    trains with peft alone, over the batches of two ranks.
    """
    import deepspeed
    from peft import AdaLoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers.integrations import HfDeepSpeedConfig

    from tests.hf.stack import Text, forget

    forget()
    schedule = {"tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": ADALORA_STEPS}
    config = AdaLoraConfig(init_r=4, target_r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **schedule)
    model = get_peft_model(llama(), config)
    torch.manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape) * 0.05
    lr, losses, importances = 1e-2, [], []
    batches = [
        [Text().batch(4 * step + 2 * i, 4 * step + 2 * i + 2) for i in range(2)] for step in range(ADALORA_STEPS)
    ]
    if zero is None:
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr, weight_decay=0.0)
    else:
        params = {"lr": lr, "weight_decay": 0.0}
        ds = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2 // world,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": params},
        }
        alive = HfDeepSpeedConfig(ds)
        engine = deepspeed.initialize(model=model, config_params=alive.config)[0]
        adapters = [p for p in model.parameters() if p.requires_grad]
        is_sharded = any(hasattr(p, "ds_id") and p.ds_status.name == "NOT_AVAILABLE" for p in adapters)
        assert is_sharded == ("stage3_param_persistence_threshold" in zero)
    for step in range(ADALORA_STEPS):
        mine = batches[step] if world == 1 else [batches[step][rank]]
        for i, batch in enumerate(mine):
            loss = model(**batch).loss / len(mine) if zero is None else engine(**batch).loss
            losses.append(loss.item() * (len(mine) if zero is None else 1))
            loss.backward() if zero is None else engine.backward(loss)
            if zero is not None and i < len(mine) - 1:
                engine.step()
        if zero is None:
            model.base_model.update_and_allocate(step)
            optimizer.step()
            optimizer.zero_grad()
        else:
            if is_sharded and step == 0:
                with pytest.raises(deepspeed.StateError, match="GatheredParameters"):
                    model.base_model.update_and_allocate(step)
                model.base_model.rankallocator.reset_ipt()
            with deepspeed.zero.GatheredParameters(adapters, modifier_rank=0, enabled=is_sharded):
                model.base_model.update_and_allocate(step)
            engine.step()
        ipt = model.base_model.rankallocator.ipt
        importances.append({name: value.clone() for name, value in ipt.items()})
    state = model.state_dict() if zero is None else engine.module_state_dict()
    state = {name: value.detach().clone() for name, value in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=state)
    if zero is not None:
        engine.destroy()
    return losses, importances, saved, config.rank_pattern


@functools.cache
def adapt_plainly():
    return on_ranks(1, adapt, None)[0]


@pytest.mark.parametrize(
    "world, zero",
    [
        (2, {"stage": 0}),
        (2, {"stage": 2}),
        (1, {"stage": 3}),
        (2, {"stage": 3}),  # small parameters stay whole, as AdaLoRA requires
        (2, {"stage": 3, "stage3_param_persistence_threshold": 0}),  # updating the masks requires a gather
    ],
)
def test_adalora_trains_as_without_deepspeed(world, zero):
    found, expected = on_ranks(world, adapt, zero), adapt_plainly()
    print(found, expected)
    for rank, (losses, importances, saved, pattern) in enumerate(found):
        assert losses == pytest.approx(expected[0][rank::world], rel=5e-6)
        assert pattern == expected[3] and 0 < sum(map(sum, pattern.values())) <= 2 * len(pattern)
        for step, each in enumerate(importances):
            assert each.keys() == expected[1][step].keys() and (len(each) > 0) == (step < ADALORA_STEPS - 1)
            for name, value in each.items():
                torch.testing.assert_close(value, expected[1][step][name], rtol=1e-3, atol=1e-7, msg=f"{step} {name}")
        assert saved.keys() == expected[2].keys()
        for name, value in expected[2].items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5, msg=name)
