"""Activations that are counted from tensors without data equal the bytes that a real forward on the CPU saves, for each
family."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.ledger import all_ledgers
from deepspeed_c.config import load_config
from deepspeed_c.config.checkpoint import ActivationCheckpointing, ActivationOffload
from deepspeed_c.engine.precision import Precision
from deepspeed_c.errors import ModelError
from deepspeed_c.plan.activations import ForwardShape, Traced, trace_activations
from deepspeed_c.plan.live_bytes import LiveBytes
from deepspeed_c.plan.memory import MASTERS, STATE, WEIGHTS
from deepspeed_c.plan.table import plan_table
from deepspeed_c.plan.timeline import options_of
from tests.cells import cells
from tests.deepspeed_c.plan.families import FAMILIES, N_LAYERS, make, tokens
from tests.ranks import run_ranks
from tests.toys import Mlp, Stack, mean_square
from tests.training import config, step

N_SAMPLES, N_TOKENS = 2, 128
PRECISIONS = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}  # fmt: skip


def policy(model: torch.nn.Module, precision: str) -> Precision:
    source = {"train_micro_batch_size_per_gpu": N_SAMPLES, **PRECISIONS[precision]}
    return Precision(load_config(source, world_size=1, batch="skip"), model)


def saved_by(model: torch.nn.Module, precision: Precision, batch: dict[str, torch.Tensor]) -> int:
    """The bytes of storages that autograd saves in a forward, without parameters and buffers."""
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), precision.autocast(torch.device("cpu")):
        model(**batch)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(n for place, n in storages.items() if place not in weights)


@pytest.mark.parametrize(("family", "precision"), cells(FAMILIES, PRECISIONS, at_once=1))
def test_what_is_counted_is_what_a_forward_saves(family, precision):
    with torch.device("meta"):
        outline = make(family)
    traced = trace_activations(outline, ForwardShape(N_SAMPLES, N_TOKENS), policy(outline, precision), None, "cpu")
    assert all(p.is_meta for p in outline.parameters())
    real = make(family)
    settings = policy(real, precision)
    if settings.dtype is not None:
        for param in real.parameters():
            param.data = param.data.to(settings.dtype)
    measured = saved_by(real, settings, tokens(N_SAMPLES, N_TOKENS))
    assert abs(traced.saved_bytes / measured - 1) < 0.001, (traced.saved_bytes, measured)
    assert len(traced.layers) == N_LAYERS * (2 if family == "t5" else 1)


def stack(n_blocks: int = 6) -> Stack:
    """Blocks that keep activations of nine times the size of their input."""
    return Stack(
        n_blocks, lambda: Mlp(64, 256, lambda y: torch.nn.functional.gelu(y).sigmoid(), adds=True), mean_square
    )


SHAPE = (512, 64)
INPUT = 4 * 512 * 64
KEPT = (1 + 4 + 4) * INPUT  # inputs of layer and gelu, and the output of sigmoid, which the last product reads


def trace(model: torch.nn.Module) -> Traced:
    return trace_activations(model, ForwardShape(SHAPE[0], sample=SHAPE[1:]), policy(model, "fp32"), "auto", "cuda")


def test_each_option_of_a_stack_by_its_formula():
    with torch.device("meta"):
        traced = trace(stack())
    options, asked = options_of(traced, ActivationCheckpointing(layers="auto"), n_tensor=4)
    peaks = {option.name: option.peak() for option in options}
    n = len(traced.layers)
    assert n == 6 and options[asked].name == "recomputed"
    outside = INPUT  # the input of the loss
    # KEPT includes the input of each layer. The loss keeps the last output.
    assert peaks["none"] == n * KEPT + outside
    # In the backward of the last layer all inputs are alive, and the other saved tensors of this layer.
    assert peaks["recomputed"] == n * INPUT + KEPT - INPUT
    # The inputs of two layers are whole: of the layer that runs, and of one more.
    assert peaks["partitioned"] == n * INPUT // 4 + 2 * INPUT + KEPT - INPUT
    for name in ("cpu", "nvme"):
        assert peaks[name] == 2 * INPUT + KEPT - INPUT
    by_name = {option.name: option for option in options}
    assert by_name["cpu"].host_peak == by_name["nvme"].nvme_peak == (n - 1) * INPUT
    assert by_name["cpu"].nvme_peak == by_name["nvme"].host_peak == 0
    assert peaks["recomputed"] < peaks["budget"] < peaks["none"]
    assert 0 < by_name["budget"].run_again < 1


def test_a_part_of_what_would_go_to_the_disk_stays():
    with torch.device("meta"):
        traced = trace(stack())
    offload = ActivationOffload(device="nvme", nvme_path="/nowhere", max_in_cpu=2 * INPUT)
    options, asked = options_of(traced, ActivationCheckpointing(layers="auto", offload=offload))
    assert options[asked].name == "nvme"
    assert (options[asked].host_peak, options[asked].nvme_peak) == (2 * INPUT, 3 * INPUT)
    on_host, asked = options_of(traced, ActivationCheckpointing(layers="auto", offload=offload), is_host=True)
    assert (on_host[asked].host_peak, on_host[asked].nvme_peak) == (0, 3 * INPUT)
    assert on_host[asked].peak() == options[asked].peak() + 2 * INPUT


def test_a_budget_that_only_a_file_makes_room_for():
    with torch.device("meta"):
        traced = trace(stack(n_blocks=12))
    offload = ActivationOffload(device="nvme", nvme_path="/nowhere", max_in_cpu="1GiB")
    recomputed = next(
        option for option in options_of(traced, ActivationCheckpointing())[0] if option.name == "recomputed"
    )
    budget = recomputed.peak() - 4 * INPUT
    for is_host in (False, True):
        section = ActivationCheckpointing(layers="auto", budget=budget)
        options, asked = options_of(traced, section, is_host=is_host)
        assert options[asked].name == "budget" and str(budget) in options[asked].refusal
        section = ActivationCheckpointing(layers="auto", budget=budget, offload=offload)
        options, asked = options_of(traced, section, is_host=is_host)
        found = options[asked]
        assert found.name == "budget" and 0 < found.peak() <= budget, found
        # If host memory is separate, "max_in_cpu" bytes of it are used first.
        assert (found.host_peak > 0, found.nvme_peak > 0) == ((False, True) if is_host else (True, False))


@pytest.mark.parametrize("layers", [None, "auto"])
def test_forward_ends_with_what_an_engine_holds(run_ranks, layers):
    planned, measured = run_ranks(1, hold, layers)[0]
    assert abs(planned / measured - 1) < 0.05, (planned, measured)


def hold(rank: int, world: int, layers: str | None) -> tuple[int, int]:
    section = {"layers": layers}
    settings = config(optimizer="AdamW", rows=SHAPE[0], lr=1e-3, activation_checkpointing=section)
    with torch.device("meta"):
        options, asked = options_of(trace(stack()), ActivationCheckpointing(**section), is_host=True)
    forward = [moment for moment in options[asked].moments if not moment.is_backward]
    with deepspeed_c.initialize(model=stack(), config=settings)[0] as engine, LiveBytes() as live:
        x = torch.ones(SHAPE) * 2
        before = live.nbytes() - INPUT  # the input of the first layer counts
        loss = engine(x)
        held = live.nbytes() - before - sum(p.nbytes for p in engine.module.parameters())  # operators view parameters
        del loss
    return forward[-1].nbytes, held


@pytest.mark.parametrize(("device", "mask_bytes"), [("cpu", 4), ("cuda", 1)])
def test_dropout_keeps_a_mask(device, mask_bytes):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    traced = trace_activations(model, ForwardShape(5, sample=(8,)), policy(model, "fp32"), None, device)
    assert traced.saved_bytes == 5 * 8 * (4 + mask_bytes)
    off = trace_activations(model.eval(), ForwardShape(5, sample=(8,)), policy(model, "fp32"), None, device)
    assert off.saved_bytes == 5 * 8 * 4


def test_a_forward_that_reads_values_is_refused_by_name():
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    model = Reads()
    with pytest.raises(ModelError, match="DataDependent") as caught:
        trace_activations(model, ForwardShape(2, sample=(4,)), policy(model, "fp32"), None, "cpu")
    assert "--activations" in caught.value.fix
    with pytest.raises(ModelError, match="neither the tokens"):
        trace_activations(model, ForwardShape(2), policy(model, "fp32"), None, "cpu")


TP = config(optimizer="AdamW", rows=N_SAMPLES, lr=1e-3, tensor_parallel={"autotp_size": 2}, bf16={"enabled": True})


def run_cut(rank: int, world: int, family: str, stage: int, section: dict) -> dict[str, int]:
    source = {**TP, "zero_optimization": {"stage": stage}, "activation_checkpointing": section}
    with deepspeed_c.initialize(model=make(family), config=source)[0] as engine:
        ledger = next(each for each in all_ledgers() if each.ranks == [0, 1] or len(each.ranks) == 2)
        batch = tokens(N_SAMPLES, N_TOKENS)
        step(engine, **batch)
        n_before = ledger.last
        loss = engine(**batch).loss
        engine.backward(loss)
        # A read of cut logits gathers them. The model does not read them.
        entries = [each for each in ledger.recent(ledger.last - n_before) if each.label != "output of logits"]
        assert {each.op for each in entries} == {"all-reduce", "all-gather"}
        sent = sum(each.n_bytes // 2 * (2 if each.op == "all-reduce" else 1) for each in entries)
        held = sum(p.numel() for p in engine.module.parameters())
        units = {*engine.optimizer.reducer.sums.units}
        engine.step()
        return {
            "elements": held,
            WEIGHTS: sum(unit.weight_bytes for unit in units),
            MASTERS: sum(unit.master_bytes() for unit in units),
            STATE: sum(
                t.nbytes for s in engine.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()
            ),
            "sent": sent,
        }


@pytest.mark.parametrize(("family", "stage", "layers"), [("llama", 1, None), ("llama", 1, "auto"), ("gpt2", 2, None)])
def test_two_ranks_that_hold_a_model_together(family, stage, layers):
    section = {"layers": layers}
    source = {**TP, "zero_optimization": {"stage": stage}, "activation_checkpointing": section}
    with torch.device("meta"):
        model = make(family)
    table = plan_table(source, 2, model=model, batch=ForwardShape(N_SAMPLES, N_TOKENS))
    kinds = table.rows[table.chosen].plan.phases["step"].kinds
    option = table.options[table.asked]
    planned = {
        "elements": table.sizes.numel, WEIGHTS: kinds[WEIGHTS], MASTERS: kinds[MASTERS], STATE: kinds[STATE],
        "sent": option.wire_bytes,
    }  # fmt: skip
    measured = run_ranks(2, run_cut, family, stage, section, preload="tests.deepspeed_c.inject.preload")[0]
    assert planned == measured
