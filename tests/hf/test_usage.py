"""Uses of ``deepspeed`` other than training by the packages of the stack: detection, imported names, class comparisons,
and configurations that the packages write.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

import deepspeed_c
from tests.hf.stack import LEARNING_RATE, Text, forget, llama, on_ranks
from tests.ranks import run_ranks
from tests.training import config


def detect(rank, world):
    import importlib

    import accelerate.utils.imports
    from accelerate.utils.versions import compare_versions
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_available
    from transformers.utils.versions import require_version_core

    forget()
    require_version_core("deepspeed>=0.9.3")
    wanted = [(">=", v) for v in ("0.3.1", "0.5.5", "0.9.3", "0.11.0", "0.14.0", "0.14.4", "0.16.4", "0.18.2")]
    return {
        "found": [
            is_deepspeed_available(),
            accelerate.utils.imports.is_deepspeed_available(),
            importlib.import_module("trl.import_utils")._is_package_available("deepspeed"),
        ],
        "bases": [base.__module__ for base in HfDeepSpeedConfig.__mro__],
        "wrappers": [
            hasattr(accelerate.utils, f"DeepSpeed{name}Wrapper") for name in ("Engine", "Optimizer", "Scheduler")
        ],
        "gates": [compare_versions("deepspeed", *each) for each in wanted]
        + [not compare_versions("deepspeed", "<", "0.14.5")],
    }


def test_packages_find_it_in_the_version_that_they_want():
    found = on_ranks(1, detect)[0]
    assert all(found["found"]) and all(found["wrappers"]) and all(found["gates"]), found
    assert "accelerate.utils.deepspeed" in found["bases"], found


def look_up(rank, world):
    import logging

    import deepspeed
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import logger, safe_get_full_grad, set_z3_leaf_modules

    assert deepspeed is deepspeed_c and VALID_LR_SCHEDULES is deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert partition_parameters.zero_wrapper_for_fp_tensor_constructor and partition_parameters.get_accelerator
    assert partition_parameters._orig_torch_arange is torch.arange
    assert isinstance(logger, logging.Logger) and logger is deepspeed.utils.logging.logger
    assert callable(safe_get_full_grad) and callable(set_z3_leaf_modules) and issubclass(DeepSpeedOptimizer, object)
    assert comm.is_initialized() and (comm.get_rank(), deepspeed.comm.get_rank()) == (rank, rank)
    assert get_accelerator().current_device_name() == ("cpu" if not torch.cuda.is_available() else f"cuda:{rank}")
    assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert type(deepspeed.__version__) is str
    part = torch.arange(100.0)[:3]
    copy = clone_tensors_for_torch_save({"a": part, "b": [part, 1]})
    assert copy["a"].untyped_storage().nbytes() == 12 and torch.equal(copy["b"][0], part)
    weight = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [weight], "betas": (0.8, 0.9), "weight_decay": 0.1}]
    return [
        (type(o).__name__, o.param_groups[0]["betas"])
        for o in (
            DeepSpeedCPUAdam(groups, lr=0.1, weight_decay=0.0, adamw_mode=True),
            DeepSpeedCPULion(groups, lr=0.1, weight_decay=0.0),
        )
    ], type(DeepSpeedCPUAdagrad([weight], lr=0.1, weight_decay=0.0)).__name__


def test_names_that_are_imported():
    optimizers, adagrad = on_ranks(2, look_up)[0]
    assert adagrad == "DeepSpeedCPUAdagrad"
    assert optimizers == [("DeepSpeedCPUAdam", (0.8, 0.9)), ("DeepSpeedCPULion", (0.8, 0.9))]


# ---- configurations that accelerate and trl write ------------------------------------------------------------------

# The configurations of accelerate's default plugin and of trl's prepare_deepspeed on top of it. They have dotted names
# at the top level, and sizes that are no integers.
WRITTEN = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": math.inf,
    "fp16": {"enabled": True, "auto_cast": True},
    "bf16": {"enabled": False},
    "zero_allow_untested_optimizer": True,
    "zero_optimization.reduce_bucket_size": 32 * 32,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 33 * 33,
}


def initialize_as_trl(rank, world):
    engine, *rest = deepspeed_c.initialize(model=llama(), config=WRITTEN)
    assert rest == [None, None, None]
    with torch.no_grad():
        logits = engine(input_ids=Text().batch(0, 2)["input_ids"]).logits
    config = engine._config
    sizes = (
        config.zero.reduce_bucket_size,
        config.zero.stage3_param_persistence_threshold,
        config.zero.stage3_prefetch_bucket_size,
    )
    text = type(engine.config), engine.config["zero_optimization"]["stage"], logits.dtype
    engine.destroy()
    return sizes, text, logits.float()


def test_dotted_keys_mean_the_place_that_they_spell():
    sizes, text, logits = run_ranks(2, initialize_as_trl, preload="tests.hf.preload")[0]
    assert sizes == (1024, 0, 980)
    assert text == (dict, 3, torch.float16)
    expected = on_ranks(1, plain_logits)[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)


def plain_logits(rank, world):
    with torch.no_grad():
        return llama()(input_ids=Text().batch(0, 2)["input_ids"]).logits


def initialize_as_accelerate(rank, world):
    """Calls initialize with ``config_params``, an optimizer of torch, and a function that makes the schedule from its
    argument.
    """
    import deepspeed

    given = []

    def make_schedule(optimizer):
        given.append(optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    settings = config(2, "AdamW", rows=2, lr=LEARNING_RATE, accumulate=2, steps_per_print=math.inf)
    model = llama()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, config_params=settings, model_parameters=list(model.parameters()), lr_scheduler=make_schedule
    )
    assert type(engine) is deepspeed.DeepSpeedEngine and loader is None
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    assert isinstance(given[0], torch.optim.Optimizer) and schedule is engine.lr_scheduler
    for name in ("param_groups", "state", "defaults", "overflow"):
        assert hasattr(optimizer, name), name
    norms = []
    for scale_wrt_gas in (True, False, True):
        for i in range(2):
            engine.set_gradient_accumulation_boundary(is_boundary=i == 1)
            engine.backward(engine(**Text().batch(0, 2)).loss, scale_wrt_gas=scale_wrt_gas)
            if i == 0:
                with pytest.raises(deepspeed_c.StateError):
                    engine.set_train_batch_size(16)
        engine.step()  # once a window, as accelerate does
        norms.append(engine.get_global_grad_norm())
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 8 // world
    rates = schedule.get_last_lr()
    shown = optimizer.single_partition_of_fp32_groups[0].dtype
    engine.destroy()
    return norms, rates, shown


def test_config_params_and_a_schedule_that_is_made_later():
    norms, rates, dtype = on_ranks(2, initialize_as_accelerate)[0]
    assert rates == pytest.approx([LEARNING_RATE / 4]) and dtype == torch.float32
    # Weights change from window to window, but little: an unscaled gradient would be about twice as long.
    assert 1.5 < 2 * norms[1] / (norms[0] + norms[2]) < 2.5


def unfilled(rank, world):
    config = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "optimizer": {"type": "auto"}}
    with pytest.raises(deepspeed_c.ConfigError) as caught:
        deepspeed_c.initialize(model=llama(), config_params=config)
    return str(caught.value)


def test_an_auto_that_nobody_fills_is_an_error():
    text = on_ranks(1, unfilled)[0]
    assert "train_micro_batch_size_per_gpu" in text and "optimizer.type" in text


# ---- what is done with sharded parameters ---------------------------------------------------------------------------


def gather(rank, world):
    """Calls GatheredParameters like transformers and peft: with one parameter, with lists, generators and sets, also of
    buffers and plain tensors, and with none.
    """
    from deepspeed.zero import GatheredParameters, Init, register_external_parameter

    # An "auto" that Init does not need must not stop it. Buffers keep their dtype while the wrapper of transformers is
    # in place.
    from transformers.integrations.deepspeed import prevent_arange_dtype_change

    config = {
        "bf16": {"enabled": True},
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    with prevent_arange_dtype_change(), Init(config_dict_or_path=config):
        lin, other = torch.nn.Linear(6, 4), torch.nn.Linear(4, 4)
        table = torch.arange(3.0)
        cast = torch.ones(3)
    assert (table.dtype, cast.dtype) == (torch.float32, torch.bfloat16)
    lin.weight._is_hf_initialized = True
    plain, buffer = torch.nn.Parameter(torch.ones(2)), torch.zeros(3)
    identity = id(lin.weight)
    for params in (
        lin.weight,
        [lin.weight, plain, buffer],
        iter([lin.weight, lin.weight]),
        {lin.weight, buffer, other.bias},
        [],
    ):
        with GatheredParameters(params, modifier_rank=0, fwd_module=None, enabled=True):
            if not isinstance(params, list) or params:
                assert lin.weight.shape == (4, 6)
                if rank == 0:
                    with torch.no_grad():
                        lin.weight.fill_(3.0)
        assert lin.weight.ds_status.name == "NOT_AVAILABLE"
        assert lin.weight.ds_numel == 24 and lin.weight.ds_shape == (4, 6) and lin.weight.ds_tensor.numel() == 12
    register_external_parameter(other, lin.weight)
    assert lin.weight._is_hf_initialized and id(lin.weight) == identity
    with GatheredParameters(lin.weight):
        return lin.weight.float().unique().tolist(), lin.weight.dtype


def test_parameters_are_gathered_from_mixed_lists():
    assert on_ranks(2, gather) == [([3.0], torch.bfloat16)] * 2


def start_init_alone(rank, world):
    """Scripts make a model before communication is initialised, with the variables of a launcher or without any."""
    torch.distributed.destroy_process_group()
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.hf.stack import llama_config

    forget()
    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    model = AutoModelForCausalLM.from_config(llama_config())
    started = torch.distributed.is_initialized(), torch.distributed.get_backend(), torch.distributed.get_world_size()
    del config
    return started, sum(p.ds_numel for p in model.parameters()), sum(p.ds_tensor.numel() for p in model.parameters())


def test_init_starts_communication():
    whole = sum(p.numel() for p in on_ranks(1, plain_parameters)[0])
    found = run_ranks(2, start_init_alone, fresh=True, preload="tests.hf.preload")
    assert [started for started, *_ in found] == [(True, "gloo", 2)] * 2
    assert [n_elements for _, n_elements, _ in found] == [whole] * 2
    assert sum(n_held for *_, n_held in found) == whole


def plain_parameters(rank, world):
    return [p.detach() for p in llama().parameters()]


def consolidate(rank, world):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam"},
    }
    model = llama()
    model.lm_head.weight.requires_grad_(False)
    engine = deepspeed.initialize(model=model, config_params=config)[0]
    whole, trained = (
        engine._zero3_consolidated_16bit_state_dict(),
        engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True),
    )
    gathers = engine.zero_gather_16bit_weights_on_model_save()
    engine.destroy()
    below = deepspeed.initialize(model=llama(), config_params={**config, "zero_optimization": {"stage": 2}})[0]
    with pytest.raises(ValueError, match="stage 3"):
        below._zero3_consolidated_16bit_state_dict()
    below.destroy()
    if rank > 0:
        assert whole is None and trained is None
        return None
    reference = llama().state_dict()
    assert all(torch.equal(whole[name], value.bfloat16()) for name, value in reference.items())
    return gathers, sorted(whole.keys() - trained.keys())


def test_consolidated_state_dicts():
    assert on_ranks(2, consolidate)[0] == (False, ["lm_head.weight"])


def one_process(rank, world, folder):
    """A script that runs without a launcher: RANK is not set, and no process group exists."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    from tests.hf.stack import ds_config, make_trainer

    trainer = make_trainer(folder, ds_config(2), max_steps=1)
    trainer.train()
    return trainer.state.global_step, torch.distributed.get_world_size()


def test_a_script_without_a_launcher_is_one_process(tmp_path):
    assert run_ranks(1, one_process, tmp_path, fresh=True, preload="tests.hf.preload") == [(1, 1)]


def disagree(rank, world, folder):
    from tests.hf.stack import ds_config, make_trainer

    config = ds_config(2, gradient_clipping=2.0, gradient_accumulation_steps=7)
    with pytest.raises(ValueError) as caught:
        make_trainer(folder, config).train()
    return str(caught.value)


def test_all_mismatches_of_arguments_and_configuration_are_listed(tmp_path):
    text = on_ranks(1, disagree, tmp_path)[0]
    assert "gradient_accumulation_steps=7 vs hf gradient_accumulation_steps=2" in text
    assert "gradient_clipping=2.0 vs hf max_grad_norm=0.5" in text


def train_on_tensor_parallel_ranks(rank, world, folder):
    from tests.hf.stack import ds_config, make_trainer

    trainer = make_trainer(folder, ds_config(2, tensor_parallel={"autotp_size": 2}))
    loss = trainer.train().training_loss
    engine = trainer.model_wrapped
    cut = [param for param in engine.module.parameters() if getattr(param, "tp_cut", None) is not None]
    return loss, len(cut), engine.train_batch_size()


def test_the_trainer_trains_a_model_that_is_cut(tmp_path):
    (loss, n_cut, batch), other = on_ranks(2, train_on_tensor_parallel_ranks, tmp_path)
    assert n_cut > 0 and loss == other[0] and 0 < loss < 20, (loss, other)
    assert batch == 4  # 2 samples in 2 micro-batches, on one data-parallel rank


class FloatModel(torch.nn.Module):
    """Takes rows of floats, like models of images and sounds, and records their dtype."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 3)
        self.seen = set()

    def forward(self, values, labels):
        self.seen.add((str(values.dtype), str(labels.dtype)))
        logits = self.lin(values)
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def train_on_floats(rank, world, folder):
    from transformers import Trainer

    from tests.hf.stack import arguments, ds_config

    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "bf16": True, "save_on_each_node": True}
    # The Trainer derives these values from a size in the configuration of transformers' models.
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    data = [{"values": torch.randn(4), "labels": torch.tensor(i % 3)} for i in range(16)]
    models = [FloatModel(), FloatModel()]
    for i, model in enumerate(models):
        forget()
        config = ds_config(2, scheduler=False, zero_optimization=dict.fromkeys(sizes, 64))
        trainer = Trainer(model=model, args=arguments(folder, config, **changes), train_dataset=data)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if i else None)
    # The Trainer sets this key in the configuration.
    is_local = trainer.model_wrapped.config["checkpoint"]["use_node_local_storage"]
    return models[0].seen | models[1].seen, is_local, torch.equal(models[0].lin.weight, models[1].lin.weight)


def test_inputs_are_cast_and_each_node_saves(tmp_path):
    for seen, is_local, is_same in on_ranks(2, train_on_floats, tmp_path):
        assert seen == {("torch.bfloat16", "torch.int64")} and is_local and is_same
