"""transformers.Trainer with a DeepSpeed configuration trains as the plain Trainer does: losses, gradient norms, learning rates, weights.

The reference is the Trainer without DeepSpeed in the same ranks (torch's DistributedDataParallel where there are two), in fp32.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch

from tests.hf.stack import LEARNING_RATE, STEPS, ds_config, llama, make_trainer, numbers, on_ranks, weights

# Losses (about 4) and norms (about 1) have a relative tolerance. For weights, the norm of the deviation is taken
# relative to the norm of the change by training, apart from the rounding of stored weights. In fp32 only the order of
# sums differs. In 16 bits the gradients of some elements are pure rounding error, and Adam takes full-size steps from
# them.
TOLERANCE = {
    "fp32": {"loss": 2e-6, "grad_norm": 2e-5, "weights": 1e-3, "rounding": 0.0},
    "bf16": {"loss": 5e-3, "grad_norm": 3e-2, "weights": 1e-1, "rounding": 2.0**-9},
    "fp16": {"loss": 1e-3, "grad_norm": 5e-3, "weights": 5e-2, "rounding": 2.0**-12},
}


def train(rank, world, folder, deepspeed, changes):
    if changes.pop("late_schedule", False):
        model = llama()
        changes.update(model=model, optimizers=late_schedule(model, changes.get("weight_decay", 0.0)))
    trainer = make_trainer(folder, deepspeed, **changes)
    trainer.train()
    return numbers(trainer), weights(trainer), llama().state_dict()


def late_schedule(model, weight_decay):
    """WarmupDecayLR built from torch: the Trainer's linear schedule, one step late, because DeepSpeed's schedules count
    from -1.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)

    def factor(step):
        step = max(step - 1, 0)
        return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@functools.cache
def plain(world: int, folder: Path, *changes: tuple[str, object]):
    return on_ranks(world, train, folder, None, dict(changes))[0]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """``reference(world, **changes)``: results of the Trainer without DeepSpeed, computed once for each set of
    arguments."""
    folder = tmp_path_factory.mktemp("plain")
    return lambda world, **changes: plain(world, folder, *sorted(changes.items()))


def assert_equal_training(found, expected, precision="fp32", theirs_steps=False):
    (logged, state, _), (logged_expected, state_expected, start) = found, expected
    tolerance = TOLERANCE[precision]
    rates, rates_expected = logged["learning_rate"], logged_expected["learning_rate"]
    if not theirs_steps:  # the engine steps the schedule before the Trainer reads the rate to log
        rates, rates_expected = rates[:-1], rates_expected[1:]
    assert rates == pytest.approx(rates_expected, rel=1e-12)
    for name in ("loss", "grad_norm"):
        print(name, logged[name], logged_expected[name])
        assert logged[name] == pytest.approx(logged_expected[name], rel=tolerance[name])
    assert state.keys() == state_expected.keys()
    for name, value in state.items():
        moved, off = (state_expected[name] - start[name]).norm(), (value - state_expected[name]).norm()
        print(name, (off / moved).item())
        assert off <= tolerance["weights"] * moved + tolerance["rounding"] * value.norm(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_without_deepspeed(tmp_path, reference, stage, precision):
    changes = {} if precision == "fp32" else {precision: True}
    found = on_ranks(2, train, tmp_path, ds_config(stage, scheduler=False), changes)
    assert found[0][0] == found[1][0]
    assert_equal_training(found[0], reference(2), precision)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_trains_as_without_deepspeed(tmp_path, reference, stage):
    found = on_ranks(1, train, tmp_path, ds_config(stage, scheduler=False), {})
    assert_equal_training(found[0], reference(1))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("scheduler", ["ours", "theirs"])
@pytest.mark.parametrize("optimizer", ["ours", "theirs"])
def test_optimizers_and_schedules_of_either_side(tmp_path, reference, optimizer, scheduler, stage):
    config = ds_config(stage, optimizer=optimizer == "ours", scheduler=scheduler == "ours")
    changes = {"weight_decay": 0.1 if optimizer == "theirs" else 0.0}
    late = {"late_schedule": True} if scheduler == "ours" else {}
    found = on_ranks(2, train, tmp_path, config, dict(changes))
    is_theirs = optimizer == scheduler == "theirs"
    assert_equal_training(found[0], reference(2, **changes, **late), theirs_steps=is_theirs)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"label_smoothing_factor": 0.1}, id="label_smoothing"),
        pytest.param({"gradient_accumulation_steps": 1, "max_grad_norm": 1e9}, id="neither_accumulated_nor_clipped"),
        pytest.param({"rows": 60, "num_train_epochs": 1, "max_steps": -1}, id="last_window_of_an_epoch_is_short"),
    ],
)
def test_training_arguments(tmp_path, reference, stage, changes):
    found = on_ranks(2, train, tmp_path, ds_config(stage, scheduler=False), dict(changes))
    assert_equal_training(found[0], reference(2, **changes))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(tmp_path, reference, stage, use_reentrant):
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    found = on_ranks(2, train, tmp_path, ds_config(stage, scheduler=False), changes)
    assert_equal_training(found[0], reference(2))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["by the section", "by the Trainer"])
def test_the_section_recomputes_layers(tmp_path, reference, stage, changes):
    section = {"check": True} if changes else {"layers": "repeated"}
    config = ds_config(stage, scheduler=False, activation_checkpointing=section)
    assert_equal_training(on_ranks(2, train, tmp_path, config, dict(changes))[0], reference(2))


def frozen_norms(rank, world, folder, deepspeed, changes):
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" not in name)
    return train(rank, world, folder, deepspeed, {**changes, "model": model})


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_frozen_norms_are_there_when_layers_run_again(tmp_path, use_reentrant):
    """Issue 47254 of transformers: torch's checkpoint saves a frozen weight, and stage 3 releases that weight before
    its use.
    """
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    sharding = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 1000}
    config = ds_config(3, scheduler=False, zero_optimization=sharding)
    found = on_ranks(2, frozen_norms, tmp_path / "3", config, changes)[0]
    assert_equal_training(found, on_ranks(2, frozen_norms, tmp_path / "plain", None, {})[0])


@pytest.mark.parametrize("how", ["auto", "enabled", "enabled reentrant", "off"])
def test_layers_of_transformers_are_recomputed_as_the_section_says(how):
    from deepspeed_c.config.checkpoint import ActivationCheckpointing
    from deepspeed_c.recompute.blocks import Blocks

    def gradients(model):
        model.train()
        tokens = torch.arange(24).reshape(2, 12) % model.config.vocab_size
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [p.grad for p in model.parameters()]

    model, calls = llama(), []
    before = [dict(vars(module)) for module in model.modules()]
    if how.startswith("enabled"):
        model.gradient_checkpointing_enable({"use_reentrant": how.endswith("reentrant")})
        before = [dict(vars(module)) for module in model.modules()]
    section = ActivationCheckpointing(layers="auto") if how == "auto" else ActivationCheckpointing(check=True)
    blocks = Blocks(model, section)
    run = blocks.recomputer.run
    blocks.recomputer.run = lambda *args, **kwargs: calls.append(kwargs["is_reentrant"]) or run(*args, **kwargs)
    got, want = gradients(model), gradients(llama())
    n_layers = model.config.num_hidden_layers
    reentrant = True if how.endswith("reentrant") else None
    assert calls == ([] if how == "off" else [reentrant] * n_layers)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(got, want, strict=True))
    blocks.close()
    assert all(vars(m).keys() == b.keys() for m, b in zip(model.modules(), before))
    assert all(
        vars(m).get("_gradient_checkpointing_func") is b.get("_gradient_checkpointing_func")
        for m, b in zip(model.modules(), before)
    )


@pytest.mark.parametrize("stage, what", [(2, ["optimizer"]), (3, ["optimizer", "param"])])
def test_offload(tmp_path, reference, stage, what):
    places = {f"offload_{name}": {"device": "cpu", "pin_memory": True} for name in what}
    config = ds_config(stage, scheduler=False, zero_optimization=places)
    assert_equal_training(on_ranks(2, train, tmp_path, config, {})[0], reference(2))


# ---- going on from a checkpoint ------------------------------------------------------------------------------------


def resume(rank, world, folder, deepspeed, changes):
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **changes}
    whole = make_trainer(folder, deepspeed, **changes)
    whole.train()
    expected = numbers(whole), weights(whole)
    found = sorted(path.name for path in (folder / "checkpoint-2").iterdir())
    again = make_trainer(folder, deepspeed, model=llama(seed=5), **changes)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return expected, (numbers(again), weights(again)), found


@pytest.mark.parametrize(
    "stage, theirs, changes",
    [
        (0, False, {}),
        (1, False, {"bf16": True}),
        (2, True, {}),
        (2, False, {"fp16": True}),
        (3, False, {"bf16": True}),
        (3, True, {}),
    ],
)
def test_resumed_training_is_the_same_to_the_bit(tmp_path, stage, theirs, changes):
    config = ds_config(stage, optimizer=not theirs, scheduler=not theirs)
    expected, found, files = on_ranks(2, resume, tmp_path, config, changes)[0]
    assert {"global_step2", "latest", "zero_to_fp32.py", "trainer_state.json"} <= set(files)
    assert found[0] == expected[0]
    assert len(found[0]["loss"]) == 4
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def best(rank, world, folder, deepspeed):
    trainer = make_trainer(
        folder,
        deepspeed,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the loss falls, so by this measure the first checkpoint is the best
    )
    trainer.train()
    losses = numbers(trainer)["eval_loss"]
    return losses, trainer.evaluate()["eval_loss"], trainer.state.best_model_checkpoint


@pytest.mark.parametrize("stage", [2, 3])
def test_best_model_is_loaded_at_the_end(tmp_path, stage):
    losses, at_end, checkpoint = on_ranks(2, best, tmp_path, ds_config(stage, scheduler=False))[0]
    worst = losses.index(max(losses))
    assert worst < len(losses) - 1, losses
    assert checkpoint.endswith(f"checkpoint-{worst + 1}")
    assert at_end == pytest.approx(losses[worst], rel=1e-7)


# ---- evaluation, saving --------------------------------------------------------------------------------------------


def evaluate(rank, world, folder, deepspeed):
    """Three Trainers over one model, each with a separate engine.

    The first evaluates the model, the second trains it, and the third evaluates it again.
    """
    model = llama()

    def next_model():
        # Without DeepSpeed, accelerate wraps a model only once, so each Trainer gets a copy.
        return model if deepspeed is not None else copy.deepcopy(model)

    first = make_trainer(folder, deepspeed, model=next_model())
    before = first.evaluate()["eval_loss"]
    predicted = first.predict(first.eval_dataset)
    second = make_trainer(folder, deepspeed, model=model)
    second.train()
    after = second.evaluate()["eval_loss"]
    again = make_trainer(folder, deepspeed, model=next_model()).evaluate()["eval_loss"]
    return [before, predicted.metrics["test_loss"], after, again, *numbers(second)["loss"]], predicted.predictions.shape


def test_evaluation_without_training_at_stage_3(tmp_path):
    config = ds_config(3, optimizer=False, scheduler=False)
    (found, shape), (expected, shape_expected) = (on_ranks(2, evaluate, tmp_path, c)[0] for c in (config, None))
    assert shape == shape_expected
    print(found, expected)
    assert found == pytest.approx(expected, rel=2e-6)
    assert found[2] == pytest.approx(found[3], rel=1e-7)


def train_after_evaluation(rank, world, folder, deepspeed):
    from deepspeed_c.errors import StateError

    trainer = make_trainer(folder, deepspeed)
    trainer.evaluate()
    with pytest.raises(StateError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_trainer_that_has_evaluated_says_that_it_cannot_train(tmp_path):
    """The Trainer keeps the engine of its evaluation, and its accelerator closes this engine when training begins."""
    config = ds_config(3, optimizer=False, scheduler=False)
    assert "a new Trainer" in on_ranks(1, train_after_evaluation, tmp_path, config)[0]


def save(rank, world, folder, deepspeed, changes):
    trainer = make_trainer(folder, deepspeed, max_steps=2, **changes)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return weights(trainer), sorted(path.name for path in (folder / "saved").iterdir()) if rank == 0 else []


def read_pretrained(rank, world, folder):
    from transformers import AutoModelForCausalLM

    from tests.hf.stack import forget

    forget()
    return {name: p.float() for name, p in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


@pytest.mark.parametrize("stage, changes", [(2, {}), (3, {}), (3, {"bf16": True})])
def test_save_model(tmp_path, stage, changes):
    expected, _ = on_ranks(2, save, tmp_path, ds_config(stage), changes)[0]
    found = on_ranks(1, read_pretrained, tmp_path / "saved")[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_save_model_where_nothing_is_gathered(tmp_path):
    """In this case the Trainer saves a checkpoint. The test reads the weights from the checkpoint offline."""
    from deepspeed_c.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    config = ds_config(3, zero_optimization={"stage3_gather_16bit_weights_on_model_save": False})
    expected, files = on_ranks(2, save, tmp_path, config, {})[0]
    assert "model.safetensors" not in files and "zero_to_fp32.py" in files
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ---- hyperparameter search -----------------------------------------------------------------------------------------


class Trial:
    """The part of an optuna trial that the Trainer uses."""

    def __init__(self, number, params):
        self.number, self.params = number, params


def new_model():
    return llama()


def search(rank, world, folder, deepspeed, rates):
    from transformers import integrations
    from transformers.trainer_utils import HPSearchBackend

    trainer = make_trainer(folder, deepspeed, model_init=new_model)
    # Prepares the Trainer like a search, without a search package.
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
    hp_params, integrations.hp_params = integrations.hp_params, lambda trial: trial.params
    results = []
    try:
        for number, rate in enumerate(rates):
            trainer.train(trial=Trial(number, {"learning_rate": rate}))
            results.append((numbers(trainer), weights(trainer), llama().state_dict()))
    finally:
        integrations.hp_params = hp_params
    return results


def test_trials_of_a_hyperparameter_search_do_not_touch_one_another(tmp_path):
    rates = [LEARNING_RATE, 1e-3, LEARNING_RATE]
    found, expected = (on_ranks(2, search, tmp_path, c, rates)[0] for c in (ds_config(3, scheduler=False), None))
    for trial, trial_expected in zip(found, expected):
        assert_equal_training(trial, trial_expected)
    assert found[0][0] == found[2][0]
