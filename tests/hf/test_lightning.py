"""The calls that the DeepSpeed strategies of Lightning and Fabric make.

The tests make these calls directly, because the strategies refuse CPUs and their packages are large.
"""

from __future__ import annotations

import datetime
import importlib.util
from argparse import Namespace

import pytest
import torch

from tests.hf.stack import Text, llama, on_ranks
from tests.ranks import run_ranks
from tests.training import update


def fit(rank, world, folder, stage):
    import deepspeed
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    deepspeed.utils.logging.logger.setLevel("WARNING")
    # Communication is initialised already, so this call does nothing.
    deepspeed.init_distributed("gloo", distributed_port=29500, timeout=datetime.timedelta(minutes=1))
    off = dict.fromkeys(("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu", "profile"), False)
    deepspeed.checkpointing.configure(mpu_=None, **off)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
        "aio": {"block_size": 1 << 20, "queue_depth": 8},
    }
    results = []
    for is_resumed in (False, True):
        with deepspeed.zero.Init(enabled=stage == 3, remote_device=None, config_dict_or_path=config):
            model = llama(seed=1 if is_resumed else 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine, optimizer, _, schedule = deepspeed.initialize(
            args=Namespace(device_rank=rank),
            config=config,
            model=model,
            model_parameters=filter(lambda p: p.requires_grad, model.parameters()),
            optimizer=optimizer,
            lr_scheduler=schedule,
            dist_init_required=False,
        )
        assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(optimizer, DeepSpeedOptimizer)
        engine.lr_scheduler = None  # Lightning steps the schedule itself
        batches = [Text().batch(2 * i, 2 * i + 2) for i in range(4)]
        if is_resumed:
            path, client = engine.load_checkpoint(
                str(folder),
                tag="checkpoint",
                load_optimizer_states=True,
                load_lr_scheduler_states=False,
                load_module_strict=True,
            )
            assert client["epoch"] == 3 and path.endswith("checkpoint")
            batches = batches[2:]
        losses = []
        for i, batch in enumerate(batches):
            losses.append(update(engine, engine(**batch).loss))
            if not is_resumed and i == 1:
                engine.save_checkpoint(
                    str(folder), client_state={"epoch": 3}, tag="checkpoint", exclude_frozen_parameters=False
                )
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            norm = model.lm_head.weight.norm().item()
        assert all(hasattr(p, "ds_numel") for p in model.parameters()) == (stage == 3)
        if stage == 3:  # the counts in Lightning's model summary
            n_own = torch.tensor(sum(p.partition_numel() for p in model.parameters() if not p.ds_persist))
            torch.distributed.all_reduce(n_own)
            assert n_own.item() == sum(p.ds_numel for p in model.parameters() if not p.ds_persist)
        results.append((losses, norm))
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", [2, 3])
def test_fit_save_and_resume(tmp_path, stage):
    from deepspeed_c.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    (losses, norm), (rest, norm_resumed) = on_ranks(2, fit, tmp_path, stage)[0]
    assert rest == losses[2:] and norm == norm_resumed
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="checkpoint")
    assert state.keys() == on_ranks(1, names)[0].keys()


def names(rank, world):
    return llama().state_dict()


def versions(rank, world):
    """Lightning queries the version of the distribution, with and without a range."""
    from importlib.metadata import version

    from packaging.requirements import Requirement

    return [
        Requirement(text).specifier.contains(version("deepspeed"))
        for text in ("deepspeed", "deepspeed>=0.16.0", "deepspeed<0.6.6")
    ]


def test_versions_that_lightning_asks_for():
    assert on_ranks(1, versions)[0] == [True, True, False]


def files(rank, world, folder):
    """The files of a checkpoint in DeepSpeed's layout that Lightning's utilities read."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam"},
        "checkpoint": {"format": "deepspeed"},
    }
    engine = deepspeed.initialize(model=llama(), config=config)[0]
    update(engine, engine(**Text().batch(0, 2)).loss)
    engine.save_checkpoint(str(folder), tag="checkpoint")
    engine.destroy()
    found = get_optim_files(str(folder / "checkpoint"))
    stage = torch.load(found[0], map_location="cpu", weights_only=False)["optimizer_state_dict"]["zero_stage"]
    return len(found), int(stage), get_model_state_file(str(folder / "checkpoint"), stage)


def test_files_of_a_checkpoint_in_deepspeeds_layout(tmp_path):
    n_files, stage, model_file = on_ranks(2, files, tmp_path)[0]
    assert (n_files, stage) == (2, 2) and model_file.endswith("mp_rank_00_model_states.pt")


# ---- the strategy itself, where lightning is installed ---------------------------------------------------------------


def fabric(rank, world, folder, stage):
    """Fabric's training loop.

    Fabric's strategy refuses CPUs by two checks. Without a GPU the test disables both checks.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DeepSpeedStrategy

    class Strategy(DeepSpeedStrategy):
        def setup_environment(self):
            super(DeepSpeedStrategy, self).setup_environment()

        def _setup_distributed(self):
            self._set_world_ranks()
            self._init_deepspeed_distributed()
            self._format_config()
            self._config_initialized = True

    runner = Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=world,
        strategy=(DeepSpeedStrategy if torch.cuda.is_available() else Strategy)(stage=stage, zero_optimization=True),
        plugins=[TorchElasticEnvironment()],
        precision="32-true",
    )
    runner.launch()
    with runner.init_module():
        model = llama()
    model, optimizer = runner.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for i in range(3):
        loss = model(**Text().batch(2 * i, 2 * i + 2)).loss
        runner.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    runner.save(folder / "saved", {"model": model, "optimizer": optimizer, "step": 3})
    after = model(**Text().batch(0, 2)).loss.item()
    state = {"model": model, "optimizer": optimizer}
    rest = runner.load(folder / "saved", state)
    return losses, after, model(**Text().batch(0, 2)).loss.item(), rest.get("step")


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="the extra [test] is not installed: no lightning"
)
@pytest.mark.parametrize("stage", [2, 3])
def test_fabric(tmp_path, stage):
    losses, after, loaded, step = run_ranks(
        2, fabric, tmp_path, stage, fresh=True, timeout=300, preload="tests.hf.preload"
    )[0]
    assert losses[2] < losses[0] + 0.5 and after < losses[0]
    assert loaded == after and step == 3
