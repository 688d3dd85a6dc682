"""peft on deepspeed_c: adapters beside frozen weights of another dtype, sharded or not, trained by the Trainer as without DeepSpeed."""

from __future__ import annotations

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
    assert dtype == base_dtype  # neither masters nor a cast for what is frozen
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
    # Weights, masters and two moments of what is trained, in fp32, and what surrounds tensors in files.
    assert n_bytes < 4 * (4 * n_adapters + n_base / 2) + 60_000, n_bytes


def parameters(rank, world):
    return [(name, p.detach()) for name, p in lora().named_parameters()]


def load_base(rank, world, folder):
    """A base that is loaded under stage 3, and adapters that are made, merged and counted on it."""
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


def importances(rank, world, stage):
    """AdaLoRA's importances after one backward pass: it reads whole gradients of what is being trained."""
    import deepspeed
    from peft import AdaLoraConfig, get_peft_model
    from transformers.integrations import HfDeepSpeedConfig

    from tests.hf.stack import Text, forget

    forget()
    model = llama()
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    torch.manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape) * 0.05
    batches = [Text().batch(2 * i, 2 * i + 2) for i in range(2)]
    if stage is None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        model.base_model.update_and_allocate(1)
    else:
        ds = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW"},
        }
        alive = HfDeepSpeedConfig(ds)
        engine = deepspeed.initialize(model=model, config_params=alive.config)[0]
        engine.backward(engine(**batches[rank]).loss)
        model.base_model.update_and_allocate(1)
        engine.step()
        engine.destroy()
    return {name: value.clone() for name, value in model.base_model.rankallocator.ipt.items()}


@pytest.mark.parametrize("stage", [0, 2])
def test_adalora_reads_gradients(stage):
    found, expected = on_ranks(2, importances, stage)[0], on_ranks(1, importances, None)[0]
    assert found.keys() == expected.keys() and len(expected) > 0
    for name, value in expected.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
