"""same_bits before the first step: models, optimizers and ranks that are refused, torch's threads, the probe, and the
record in checkpoints."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_c import errors
from deepspeed_c.engine import probe as probe_file
from deepspeed_c.engine.checkpoint.kept_bits import KeptBits
from deepspeed_c.engine.probe import Probe, run_probe
from deepspeed_c.engine.torch_threads import TorchThreads
from deepspeed_c.moe.layer import MoE
from deepspeed_c.ops.optim import BY_TYPE
from deepspeed_c.ops.scope import TORCH_ELEMENTWISE
from deepspeed_c.pipe import PipelineModule
from tests import training
from tests.log_lines import LogLines
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def settings(optimizer: Any = "AdamW", *, batch: int = 12, threads: int | None = None, **sections: Any) -> dict:
    grain = sections.pop("grain", 2)
    found = training.config(
        sections.pop("stage", 1),
        optimizer,
        lr=0.01,
        train_batch_size=batch,
        same_bits={"enabled": True, "grain": grain, "threads": threads},
        **sections,
    )
    del found["train_micro_batch_size_per_gpu"]
    return found


def small_model(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), *more, nn.Linear(4, 3))


def make(model: nn.Module | None = None, config: dict | None = None, **more: Any) -> Any:
    return training.engine_of(model or small_model(), config or settings(), **more)


# -- models and ranks that are refused ----------------------------------------------------------------------------------


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch_norm": (lambda: nn.BatchNorm1d(4), "1 (BatchNorm1d) has running statistics"),
    "instance_norm": (
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        "1 (InstanceNorm1d) has running statistics",
    ),
    "sync_batch_norm": (
        lambda: nn.SyncBatchNorm(4, track_running_stats=False),
        "1 (SyncBatchNorm) takes statistics over the ranks",
    ),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "(spectral norm)"),
    "old_spectral_norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        "1 (Linear) has vectors that each forward",
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(1)
def test_modules_that_remember_forwards_are_refused(rank: int, world: int, kind: str) -> None:
    layer, reason = LAYERS[kind]
    model = small_model(layer())
    before = [(name, id(param), param.data_ptr()) for name, param in model.named_parameters()]
    with pytest.raises(errors.ModelError) as caught:
        make(model)
    assert reason in str(caught.value) and "Fix: " in str(caught.value), caught.value
    assert before == [(name, id(param), param.data_ptr()) for name, param in model.named_parameters()]


@on_ranks(1)
def test_norms_without_memory_are_accepted(rank: int, world: int) -> None:
    with make(small_model(nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))) as engine:
        assert engine(torch.ones(2, 5)).shape == (2, 3)


def axis_of_mpu(axis: str) -> Any:
    """An mpu whose two ranks lie along ``axis``."""
    both, alone = torch.distributed.group.WORLD, None
    for rank in range(2):
        group = torch.distributed.new_group([rank])
        alone = group if rank == torch.distributed.get_rank() else alone
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: alone,
        get_data_parallel_world_size=lambda: 1,
        get_data_parallel_rank=lambda: 0,
    )
    setattr(mpu, f"get_{axis}_parallel_group", lambda: both)
    setattr(mpu, f"get_{axis}_parallel_world_size", lambda: 2)
    setattr(mpu, f"get_{axis}_parallel_rank", torch.distributed.get_rank)
    return mpu


@on_ranks(2)
def test_axes_that_cut_products_are_refused(rank: int, world: int) -> None:
    given = {
        "sp": {"mesh_param": (1, 2)},
        "tp": {"mpu": axis_of_mpu("tensor_model")},
    }
    for axis, arguments in given.items():
        with pytest.raises(errors.ConfigError) as caught:
            make(**arguments)
        assert f"axis '{axis}' has 2 ranks" in str(caught.value) and "same_bits" in str(caught.value), caught.value
    pipeline = PipelineModule([nn.Linear(5, 4), nn.Linear(4, 3)], num_stages=2, loss_fn=F.mse_loss)
    with pytest.raises(errors.ConfigError, match="axis 'pp' has 2 ranks"):
        make(pipeline)
    with pytest.raises(errors.ModelError, match="MoE|MOELayer") as refused:
        make(small_model(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2)))
    assert "experts on 2 ranks" in str(refused.value), refused.value


@on_ranks(1)
def test_other_features_are_refused(rank: int, world: int) -> None:
    pipeline = PipelineModule([nn.Linear(5, 4), nn.Linear(4, 3)], num_stages=1, loss_fn=F.mse_loss)
    with pytest.raises(errors.ModelError, match="PipelineModule adds the gradients"):
        make(pipeline)
    with pytest.raises(errors.FeatureError, match="compile.deepcompile: does not go with same_bits"):
        make(config=settings(compile={"deepcompile": True}))
    with mock.patch("deepspeed_c.engine.same_bits.get_accelerator") as accelerator:
        accelerator().device_name.return_value = "cuda"
        with pytest.raises(errors.ConfigError, match="use_deterministic_algorithms"):
            make()


# -- optimizers ---------------------------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """An optimizer of the user, elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad


def bf16_model() -> nn.Module:
    return small_model().to(torch.bfloat16)


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1)
def test_optimizers_that_depend_on_the_cut_are_refused(rank: int, world: int, stage: int) -> None:
    adam = torch.optim.Adam
    no_fp32 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    cases: list[tuple[str, Callable[[list], Any] | None, dict, Callable[[], nn.Module]]] = [
        ("Adafactor does not go", None, {"optimizer": "Adafactor"}, small_model),
        ("Adam does not go with same_bits.enabled: torch's fused", lambda p: adam(p, fused=True), {}, small_model),
        ("Own does not go with same_bits.enabled: it is not known", Own, {}, small_model),
        ("states of 8 bits", lambda p: BY_TYPE["adamw"](p, lr=0.1, state_dtype=torch.int8), {}, small_model),
        ("on 16-bit masters", lambda p: torch.optim.SGD(p, lr=0.1), {}, bf16_model),
    ]
    if stage > 0:
        sgd = ("on 16-bit masters", lambda p: torch.optim.SGD(p, lr=0.1), no_fp32, small_model)
        named = ("Adam does not go with same_bits.enabled: on", None, {"torch_adam": True, **no_fp32}, small_model)
        cases += [sgd, named]
    for reason, factory, keys, model_of in cases:
        for is_made in (False, True) if factory is not None else (False,):
            keys, model = dict(keys), model_of()
            params = {"torch_adam": True} if keys.pop("torch_adam", False) else {}
            config = settings(keys.pop("optimizer", "Adam"), stage=stage, params=params, **keys)
            if is_made:
                del config["optimizer"]
            given = factory(list(model.parameters())) if is_made else factory
            with pytest.raises(errors.OptimizerError) as caught:
                make(model, config, optimizer=given)
            assert reason in str(caught.value) and "Fix: " in str(caught.value), (reason, caught.value)


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(1)
def test_other_optimizers_are_accepted(rank: int, world: int, stage: int) -> None:
    for name in ("AdamW", "Lion", "SGD", "Adagrad", "Muon", "NAdam"):
        make(config=settings(name, stage=stage)).close()
    with make(config=settings(stage=stage, zero_allow_untested_optimizer=True), optimizer=Own) as engine:
        assert isinstance(engine.basic_optimizer, Own)


def trained(cls: Any, cuts: list[int], n: int, seed: int, **options: Any) -> torch.Tensor:
    """A tensor of ``n`` elements after 5 steps, cut into pieces; and its states."""
    generator = torch.Generator().manual_seed(seed)
    bounds = [0, *cuts, n]
    weights = torch.randn(n, generator=generator)
    params = [nn.Parameter(weights[low:high].clone()) for low, high in itertools.pairwise(bounds)]
    optimizer = cls(params, **options)
    for _ in range(5):
        grads = torch.randn(n, generator=generator)
        for param, low, high in zip(params, bounds, bounds[1:]):
            param.grad = grads[low:high].clone()
        optimizer.step()
    states = [torch.cat([optimizer.state[p][key] for p in params]) for key in _elementwise(optimizer, params[0])]
    return torch.stack([torch.cat([param.detach() for param in params]), *states])


def _elementwise(optimizer: Any, param: nn.Parameter) -> list[str]:
    state = optimizer.state[param]
    return [key for key in sorted(state) if torch.is_tensor(state[key]) and state[key].shape == param.shape]


@pytest.mark.parametrize("cls", [*TORCH_ELEMENTWISE, *(BY_TYPE[kind] for kind in ("adamw", "lion", "sgd", "adagrad"))])
def test_accepted_optimizers_do_not_depend_on_the_cut(cls: type) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if cls.__name__ == "SGD" else {"lr": 0.01}
    forms = ({"foreach": False}, {"foreach": True}) if cls in TORCH_ELEMENTWISE else ({},)
    for form in forms:
        for n in (7, 31, 97, 1009):
            whole = trained(cls, [], n, n, **options, **form)
            for cuts in ([1], [n // 2 + 1], [n // 3, 2 * n // 3], [3, 5]):
                cut = trained(cls, cuts, n, n, **options, **form)
                wrong = (whole.view(torch.int32) != cut.view(torch.int32)).nonzero().tolist()
                assert not wrong, (form, n, cuts, wrong[:5], whole[:, :5], cut[:, :5])


# -- threads ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_threads_are_held_while_an_engine_lives(rank: int, world: int) -> None:
    torch.set_num_threads(3)
    first = make(config=settings(threads=2))
    second, third = make(config=settings(threads=2)), make(config=settings(threads=None))
    assert torch.get_num_threads() == 2
    with pytest.raises(errors.ConfigError, match="same_bits.threads: is 1, and 2 for another open engine"):
        make(config=settings(threads=1))
    first.close()
    third.close()
    assert torch.get_num_threads() == 2, "the second engine is open"
    second.destroy()
    second.destroy()
    assert torch.get_num_threads() == 3
    with pytest.raises(errors.ModelError):
        make(small_model(nn.BatchNorm1d(4)), settings(threads=1))
    with pytest.raises(errors.OptimizerError):
        make(optimizer=lambda params: torch.optim.Adam(params, fused=True), config=settings(threads=1))
    assert torch.get_num_threads() == 3, "refused engines restore it, too"
    torch.set_num_threads(1)


def test_a_hold_ends_once() -> None:
    before = torch.get_num_threads()
    first, second = TorchThreads(2), TorchThreads(2)
    first.close()
    first.close()
    assert torch.get_num_threads() == 2
    second.close()
    assert torch.get_num_threads() == before


@on_ranks(3)
def test_a_rank_with_other_threads_is_named(rank: int, world: int) -> None:
    torch.set_num_threads(2 if rank == 1 else 1)
    try:
        with pytest.raises(errors.RankMismatchError) as caught:
            make()
        assert "rank 1 has 2, and rank 0 has 1" in str(caught.value), caught.value
        with make(config=settings(threads=1)):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


# -- the probe ----------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_rank_with_other_bits_is_named(rank: int, world: int) -> None:
    gelu = F.gelu

    def other(x: torch.Tensor) -> torch.Tensor:
        y = gelu(x)
        return y + torch.zeros_like(y).index_fill_(0, torch.tensor([5]), 2.0**-20)

    torch.set_num_threads(2)
    replaced = mock.patch.object(probe_file.F, "gelu", other) if rank == 2 else mock.patch.object(F, "gelu", gelu)
    with replaced, pytest.raises(errors.RankMismatchError) as caught:
        make(config=settings(threads=1))
    message = str(caught.value)
    assert "gelu of (69, 521), float32: rank 2 has other bits than rank 0" in message, message
    assert message.count(f"torch {torch.__version__}") == 2, message
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_the_probe_depends_on_nothing_but_arithmetic() -> None:
    torch.manual_seed(1)
    random = torch.get_rng_state()
    first = run_probe(CPU, [torch.float32, torch.bfloat16])
    assert torch.equal(torch.get_rng_state(), random), "the probe draws no random numbers"
    torch.manual_seed(2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        again = run_probe(CPU, [torch.float32, torch.bfloat16])
    assert first == again, [(mine, other) for mine, other in zip(first.crcs, again.crcs) if mine != other]
    names = [name for name, _ in first.crcs]
    assert len(set(names)) == len(names) and first.checksum == again.checksum


def test_inputs_of_the_probe_need_all_their_bits() -> None:
    numbers = probe_file._numbers((1009,), 1, CPU, torch.float32)
    expected = [((i * 40503 + 30011 + 12345) * 48271 % 2147483647 % 65536 - 32768) / 16384 for i in range(1009)]
    assert numbers.tolist() == expected, "float64 of Python"
    assert len(set(expected)) > 900 and min(expected) < -1.9 and max(expected) > 1.9


# -- the places of weights ----------------------------------------------------------------------------------------------


class Places(nn.Module):
    """Notes the addresses of weights while they are whole, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n + 2) for n in (5, 7, 9, 11))
        self.frozen = nn.Linear(13, 1).requires_grad_(False)
        self.seen: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.seen |= {param.data_ptr() % 64 for param in layer.parameters()}
        return self.frozen(x)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_weights_begin_at_whole_lines(rank: int, world: int, stage: int) -> None:
    for bf16 in (False, True):
        config = settings(stage=stage, bf16={"enabled": bf16}, zero={"stage3_param_persistence_threshold": 12})
        with make(Places(), config) as engine:
            engine(torch.ones(2, 5, dtype=torch.bfloat16 if bf16 else torch.float32))
            assert engine.module.seen == {0}, engine.module.seen


@on_ranks(2)
def test_a_weight_at_another_place_is_named(rank: int, world: int) -> None:
    model = small_model()
    whole = torch.zeros(12)
    model.register_buffer("table", whole[1:] if rank == 1 else whole[:11])
    with pytest.raises(errors.RankMismatchError, match="table at byte"):
        make(model)


# -- checkpoints --------------------------------------------------------------------------------------------------------


def weights_of(engine: Any) -> list[torch.Tensor]:
    return [param.detach().clone() for param in engine.module.parameters()]


@on_ranks(2)
def test_a_run_resumes_with_its_grain_and_threads_alone(rank: int, world: int, folder: str) -> None:
    with make(config=settings(threads=1)) as engine:
        engine.save_checkpoint(folder, client_state={"words": "saved"})
        saved = weights_of(engine)
    for key, keys in (("threads", {"threads": 2}), ("grain", {"threads": 1, "grain": 3})):
        with make(config=settings(**keys)) as engine:
            before = weights_of(engine)
            with pytest.raises(
                errors.ConfigError, match=f"same_bits.{key}: is ., and . in the run that saved"
            ) as caught:
                engine.load_checkpoint(folder)
            assert "global_step0" in str(caught.value), caught.value
            assert all(map(torch.equal, before, weights_of(engine)))
            engine.load_checkpoint(folder, load_optimizer_states=False)
            assert all(map(torch.equal, saved, weights_of(engine))), "weights alone are loaded by any run"
        with pytest.raises(errors.ConfigError, match=f"same_bits.{key}"):
            make(config=settings(checkpoint={"auto_resume": folder}, **keys))
    with LogLines(logging.WARNING) as log, make(config=settings(threads=1)) as engine:
        assert engine.load_checkpoint(folder)[1] == {"words": "saved"}
        assert all(map(torch.equal, saved, weights_of(engine)))
        assert not [line for line in log.lines if "bits" in line], log.lines
    plain = training.config(1, "AdamW", rows=2)
    with make(config=plain) as engine:
        engine.load_checkpoint(folder)
        assert all(map(torch.equal, saved, weights_of(engine))), "a run without the mode loads it, too"


@on_ranks(2)
def test_other_bits_before_a_resume_are_told_once(rank: int, world: int, folder: str) -> None:
    with make(config=training.config(1, "AdamW", rows=2)) as engine:
        engine.save_checkpoint(folder, tag="without")
    with make(config=settings(threads=1)) as engine, LogLines(logging.WARNING) as log:
        engine.load_checkpoint(folder, tag="without")
        told = [line for line in log.lines if "was saved without same_bits" in line]
        assert len(told) == (rank == 0), log.lines
        engine.save_checkpoint(folder, tag="with")
    with mock.patch.object(probe_file, "_numbers", lambda shape, seed, device, dtype: torch.ones(shape, dtype=dtype)):
        other = make(config=settings(threads=1))
    with other, LogLines(logging.WARNING) as log:
        other.load_checkpoint(folder, tag="with")
        told = [line for line in log.lines if "was saved on arithmetic with other bits" in line]
        assert len(told) == (rank == 0), log.lines


def test_a_record_of_another_form_is_refused() -> None:
    kept = KeptBits(2, Probe((("exp", 7),), "a machine"))
    with LogLines(logging.WARNING) as log:
        kept.check(kept.record(), "ckpt/7")
        assert log.lines == []
        kept.check({**kept.record(), "version": 0}, "ckpt/7")
        assert len(log.lines) == 1 and "version 0 of same_bits" in log.lines[0], log.lines
    for damaged in ([], {}, {**kept.record(), "grain": "2"}, {**kept.record(), "threads": True}):
        with pytest.raises(errors.CheckpointError, match="ckpt/7: its record of same_bits"):
            kept.check(damaged, "ckpt/7")
