"""accelerate on deepspeed_c: plugins from a configuration and from the environment, two plugins in one process, saving,
clipping and accumulation.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from tests.hf.stack import LEARNING_RATE, MICRO_BATCH, Text, forget, llama, on_ranks
from tests.training import config

STEPS = 4


def loader(rows=64):
    return torch.utils.data.DataLoader(
        Text(rows), batch_size=MICRO_BATCH
    )  # without shuffling, which accelerate does itself


def plugin(stage, **changes):
    from accelerate import DeepSpeedPlugin

    settings = config(
        stage,
        None,
        rows="auto",
        accumulate="auto",
        zero={"reduce_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": True},
        gradient_clipping="auto",
        bf16={"enabled": False},
    )
    return DeepSpeedPlugin(hf_ds_config={**settings, **changes})


def accelerator(deepspeed, **kwargs):
    """An Accelerator on CPU ranks.

    With DeepSpeed, Accelerator accepts no ``cpu=True``. It takes CPU ranks for one process unless
    ``PartialState(cpu=True)`` exists before it.
    """
    from accelerate import Accelerator, PartialState

    PartialState(cpu=True)
    if deepspeed is None:
        return Accelerator(cpu=True, **kwargs)
    which = "deepspeed_plugins" if isinstance(deepspeed, dict) else "deepspeed_plugin"
    return Accelerator(**({} if deepspeed == "from the environment" else {which: deepspeed}), **kwargs)


def loop(acc, model, optimizer, data, schedule=None, steps=STEPS, clip=0.5):
    """The training loop of accelerate's documentation. Returns (losses, norms) by step."""
    losses, norms = [], []
    batches = iter(data)
    while len(norms) < steps:
        with acc.accumulate(model):
            loss = model(**next(batches)).loss
            acc.backward(loss)
            if acc.sync_gradients:
                norms.append(acc.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            if schedule is not None and acc.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        losses.append(acc.reduce(loss.detach(), "mean").item())
    return losses, [float(norm) for norm in norms]


def whole(acc, model):
    """The gathered weights of the model on rank 0. Collective."""
    state = acc.get_state_dict(model)
    return None if state is None else {name: value.detach().float().clone() for name, value in state.items()}


def train(rank, world, stage, accumulation, with_schedule):
    forget()
    # DeepSpeed clips by its configuration. With it, clip_grad_norm_ only returns the norm.
    deepspeed = None if stage is None else plugin(stage, gradient_clipping=0.5)
    acc = accelerator(deepspeed, gradient_accumulation_steps=accumulation)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    parts = [model, optimizer, loader()]
    if with_schedule:
        parts.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    model, optimizer, data, *schedule = acc.prepare(*parts)
    losses, norms = loop(acc, model, optimizer, data, *schedule)
    return losses, norms, whole(acc, model), optimizer.param_groups[0]["lr"], str(acc.distributed_type)


@pytest.mark.always
@pytest.mark.parametrize(
    "world, stage, accumulation, with_schedule",
    [(1, 2, 2, True), (2, 0, 2, True), (2, 1, 1, False), (2, 2, 2, True), (2, 3, 2, True)],
)
def test_accelerator_trains_as_without_deepspeed(world, stage, accumulation, with_schedule):
    found, expected = (on_ranks(world, train, which, accumulation, with_schedule)[0] for which in (stage, None))
    assert found[4] == "DistributedType.DEEPSPEED" != expected[4]
    assert found[3] == pytest.approx(expected[3], rel=1e-12)
    print(found[:2], expected[:2])
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1] == pytest.approx(expected[1], rel=2e-5)
    for name, value in expected[2].items():
        torch.testing.assert_close(found[2][name.removeprefix("module.")], value, rtol=0, atol=1e-4, msg=name)


def train_in_float8(rank, world):
    """Losses of plain torch on these ranks, and of stages 0, 2 and 3; and the layers that torchao has converted."""
    from accelerate.utils import AORecipeKwargs
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    losses, layers, recipe = [], [], Float8LinearConfig(emulate=True)
    for stage in (None, 0, 2, 3):
        forget()
        model = llama(hidden_size=32, intermediate_size=64)
        if stage is None:  # without DeepSpeed accelerate would run autocast around these layers
            acc = accelerator(None)
            convert_model_to_fp8_ao(model, recipe)
        else:
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            deepspeed = plugin(stage, gradient_clipping=0.5, zero_optimization=zero)
            acc = accelerator(deepspeed, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=recipe)])
        model, optimizer, data = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), loader())
        losses.append(loop(acc, model, optimizer, data)[0])
        layers.append(sum(type(module).__name__ == "Float8Linear" for module in model.modules()))
        if stage is not None:
            model.close()
    return losses, layers


def test_float8_layers_of_torchao_reach_the_engine():
    pytest.importorskip("torchao")
    (plain, *found), layers = on_ranks(2, train_in_float8)[0]
    print(plain, found)
    assert min(layers) > 0 and len(set(layers)) == 1, layers
    for losses in found:
        assert losses == pytest.approx(plain, rel=2e-5)


def exact_types(rank, world):
    import deepspeed
    from accelerate.utils import (
        DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper,
        DeepSpeedSchedulerWrapper,
        DummyOptim,
        DummyScheduler,
    )

    forget()
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
    }
    acc = accelerator(plugin(2, **sections))
    model = llama()
    optimizer = DummyOptim(model.parameters(), lr=1e-3, weight_decay=0.01)
    engine, wrapped, schedule, _ = acc.prepare(model, optimizer, DummyScheduler(optimizer), loader())
    assert type(engine) is deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine
    assert type(wrapped) is DeepSpeedOptimizerWrapper and type(schedule) is DeepSpeedSchedulerWrapper
    assert type(acc.deepspeed_engine_wrapped) is DeepSpeedEngineWrapper
    assert acc.unwrap_model(engine) is model
    assert wrapped.param_groups[0]["weight_decay"] == 0.01
    params = acc.deepspeed_config["scheduler"]["params"]
    rates = []
    for _ in range(3):
        acc.backward(engine(**Text().batch(0, 2)).loss)
        rates.append(schedule.get_last_lr()[0])
    return params["warmup_num_steps"], engine.train_batch_size(), rates


def test_types_are_the_exported_ones_and_dummies_are_filled():
    warmup, batch, rates = on_ranks(2, exact_types)[0]
    assert (warmup, batch) == (1, 2 * MICRO_BATCH)
    assert rates == [0.0, pytest.approx(1e-3), pytest.approx(1e-3)]  # as in DeepSpeed: log(1) first, for any warm-up


def from_environment(rank, world, variables):
    forget()
    os.environ.update(variables)
    acc = accelerator("from the environment")
    config = acc.state.deepspeed_plugin.deepspeed_config
    model = llama()
    engine, *_ = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader())
    acc.backward(engine(**Text().batch(0, 2)).loss)
    return (
        engine.zero_optimization_stage(),
        engine.gradient_accumulation_steps(),
        engine.gradient_clipping(),
        engine.bfloat16_enabled(),
        config,
    )


def test_plugin_from_the_environment():
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.25",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    stage, accumulation, clipping, is_bf16, config = on_ranks(2, from_environment, variables)[0]
    assert (stage, accumulation, clipping, is_bf16) == (3, 3, 0.25, True)
    assert config["steps_per_print"] == float("inf")
    assert config["zero_optimization"]["offload_param"] == {"device": "none", "nvme_path": None}


def file_from_environment(rank, world, path):
    """The environment names the configuration's file.

    With ``zero3_init_flag``, the model is sharded while it is made.
    """
    from transformers import AutoModelForCausalLM

    from tests.hf.stack import llama_config

    forget()
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path),
        ACCELERATE_CONFIG_DS_FIELDS="deepspeed_config_file,zero3_init_flag",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="true",
    )
    acc = accelerator("from the environment")
    model = AutoModelForCausalLM.from_config(llama_config())
    held = sum(p.ds_tensor.numel() for p in model.parameters()), sum(p.ds_numel for p in model.parameters())
    engine, *_ = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader())
    acc.backward(engine(**Text().batch(0, 2)).loss)
    return held, engine.zero_optimization_stage(), engine.gradient_clipping(), engine.train_batch_size()


def test_file_from_the_environment(tmp_path):
    settings = config(3, None, rows="auto", zero={"reduce_bucket_size": "auto"}, gradient_clipping=0.75)
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    found = on_ranks(2, file_from_environment, tmp_path / "ds.json")
    assert [rest for _, *rest in found] == [[3, 0.75, 2 * MICRO_BATCH]] * 2
    (held, whole), (held_there, _) = (held for held, *_ in found)
    assert held + held_there == whole > 0


def save_and_load(rank, world, folder, stage):
    forget()
    results = []
    for seed in (0, 5):
        forget()
        acc = accelerator(plugin(stage))
        model = llama(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, data, schedule = acc.prepare(model, optimizer, loader(), schedule)
        if seed == 0:
            loop(acc, model, optimizer, data, schedule, steps=2)
            acc.save_state(folder / "state", client_state={"note": 17})
        else:
            acc.load_state(folder / "state")
        rest = loop(acc, model, optimizer, acc.skip_first_batches(data, 2), schedule, steps=3)
        results.append((rest, whole(acc, model), schedule.get_last_lr()))
    return results, sorted(path.name for path in (folder / "state" / "pytorch_model").iterdir())


@pytest.mark.parametrize("stage", [2, 3])
def test_saved_state_goes_on_to_the_bit(tmp_path, stage):
    (first, second), files = on_ranks(2, save_and_load, tmp_path, stage)[0]
    assert first[0] == second[0] and first[2] == second[2]
    assert "manifest.json" in files  # this package's layout, because no other is configured
    for name, value in first[1].items():
        assert torch.equal(second[1][name], value), name


def two_plugins(rank, world):
    """A trained student and an evaluated teacher, each with a separate plugin, as in accelerate's guide."""
    from accelerate import Accelerator

    forget()
    plugins = {"student": plugin(2), "teacher": plugin(3, train_micro_batch_size_per_gpu=MICRO_BATCH)}
    acc = accelerator(plugins)
    student, teacher_model = llama(0), llama(1)
    before = {name: value.clone() for name, value in teacher_model.state_dict().items()}
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE)
    student, optimizer, data = acc.prepare(student, optimizer, loader())
    acc.state.select_deepspeed_plugin("teacher")
    teacher_acc = Accelerator()
    teacher = teacher_acc.prepare(teacher_model)
    assert teacher.zero_optimization_stage() == 3 and not hasattr(teacher.optimizer, "param_groups")
    acc.state.select_deepspeed_plugin("student")
    losses = []
    for batch, _ in zip(data, range(3)):
        with torch.no_grad():
            target = teacher(**batch).logits
        loss = (student(**batch).logits - target).square().mean()
        acc.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    after = whole(teacher_acc, teacher)
    unchanged = after is None or all(torch.equal(after[name], value) for name, value in before.items())
    return losses, unchanged, student.zero_optimization_stage()


def test_two_models_with_two_plugins():
    for losses, unchanged, stage in on_ranks(2, two_plugins):
        assert unchanged and stage == 2
        assert losses[2] < losses[0]


def leaves(rank, world):
    from transformers import MixtralConfig, MixtralForCausalLM

    forget()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=61, num_local_experts=3, num_experts_per_tok=1))
    os.environ["ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"] = "MixtralSparseMoeBlock"
    acc = accelerator(plugin(3))
    engine, _, _ = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader())
    acc.backward(engine(**Text().batch(rank, rank + 1)).loss)  # the ranks' tokens go to different experts
    return [type(module).__name__ for module in model.modules() if getattr(module, "_z3_leaf", False)]


def test_layers_of_experts_are_leaves():
    assert on_ranks(2, leaves) == [["MixtralSparseMoeBlock"]] * 2


def no_sync(rank, world, stage):
    forget()
    acc = accelerator(plugin(stage, gradient_accumulation_steps=1))
    model = llama()
    model, _, data = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), loader())
    first, second = (next(iter(data)) for _ in range(2))
    with acc.no_sync(model):
        model.backward(model(**first).loss, scale_wrt_gas=False)
    acc.backward(model(**second).loss)
    return float(model.get_global_grad_norm())


def grad_sum(rank, world):
    forget()
    model, norms = llama(), []
    batches = list(loader())[:2]
    for batch in (batches[rank], batches[rank]):
        model(**batch).loss.backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
        norms.append((p.grad / world).norm())
    return torch.stack(norms).norm().item()


@pytest.mark.parametrize("stage", [1, 2])
def test_no_sync_puts_the_reduction_off(stage):
    assert on_ranks(2, no_sync, stage)[0] == pytest.approx(on_ranks(2, grad_sum)[0], rel=1e-5)


def overflow(rank, world):
    forget()
    acc = accelerator(plugin(2, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1}))
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, data = acc.prepare(model, optimizer, loader())
    skipped, weights = [], []
    for batch, _ in zip(data, range(40)):
        acc.backward(model(**batch).loss)
        optimizer.step()
        skipped.append(acc.optimizer_step_was_skipped)
        weights.append(model.module.lm_head.weight.detach().clone())
        if not skipped[-1]:
            break
    return skipped, all(torch.equal(w, weights[0]) for w in weights[:-1]), torch.equal(weights[-1], weights[0])


def test_a_step_that_overflows_is_told_as_skipped():
    for skipped, unchanged, still in on_ranks(2, overflow):
        assert len(skipped) > 2 and skipped == [True] * (len(skipped) - 1) + [False]
        assert unchanged and not still


def train_from_options(rank, world, stage, offloads_params):
    """The options of accelerate's tests, which configure offload_param at every stage."""
    from accelerate import DeepSpeedPlugin

    forget()
    options = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu" if offloads_params else "none"}
    made = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=1, gradient_clipping=1.0, zero3_save_16bit_model=True, **options
    )
    made.deepspeed_config["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    acc = accelerator(made)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, data = acc.prepare(model, optimizer, loader())
    found = loop(acc, model, optimizer, data, clip=1.0)
    device = model.config["zero_optimization"]["offload_param"]["device"]
    acc.end_training()
    return found, device, model.zero_optimization_stage()


@pytest.mark.parametrize("stage", [1, 2])
def test_offload_param_below_stage_3_changes_nothing(stage):
    found, expected = (on_ranks(2, train_from_options, stage, offloads) for offloads in (True, False))
    for (losses, device, reached), (losses_expected, _, _) in zip(found, expected):
        assert losses == losses_expected and (device, reached) == ("cpu", stage)
