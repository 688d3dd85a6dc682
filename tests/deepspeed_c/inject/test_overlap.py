"""Collectives that overlap with other work, and norms over only the rank's own tokens. Training equals one plain torch
process, and the bytes that are sent equal the formula."""

from __future__ import annotations

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inject import cut_model, exchange, overlap
from tests.cells import full
from tests.deepspeed_c.inject.families import VOCAB, make
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.ranks import on_ranks, run_ranks
from tests.training import config, descend_together, engine_of, update

STEPS = 2
SHAPES = ((2, 9), (3, 10), (1, 7))  # (samples, tokens): not all are divisible by 2 or by the ranks


def batch(step: int, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def make_config(stage: int = 0, **section) -> dict:
    zero = {"stage3_param_persistence_threshold": 50}
    return config(
        stage, "Adam", rows=2, lr=1e-2, params={"eps": 1e-4}, zero=zero, gradient_clipping=0.5, tensor_parallel=section
    )


def plain(family: str):
    model = make(family).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in range(STEPS):
        for shape in SHAPES:
            norms.append(descend_together(optimizer, [model(**batch(step, shape)).loss], 0.5))
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def body(rank: int, world: int, family: str, cells: list[dict]):
    found = []
    for cell in cells:
        cell = dict(cell)
        more = cell.pop("more", {})
        config = {**make_config(autotp_size=world, **cell), **more}
        with engine_of(make(family).train(), config) as engine:
            norms = []
            for step in range(STEPS):
                for shape in SHAPES:
                    update(engine, engine(**batch(step, shape)).loss)
                    norms.append(engine.get_global_grad_norm())
            found.append((logical(engine), norms))
    return found


OVERLAP, NORMS = {"tp_overlap_comm": True}, {"sequence_parallel_norms": True}
BOTH = {**OVERLAP, **NORMS}


def stage(n: int) -> dict:
    return {"zero_optimization": {"stage": n, "stage3_param_persistence_threshold": 50}}


AGAIN = {"activation_checkpointing": {"layers": "auto"}}
EVERYTHING = [
    *(OVERLAP, NORMS, BOTH),
    *({**BOTH, "more": stage(n)} for n in (1, 2, 3)),
    *({**section, "more": {**stage(n), **AGAIN}} for section in (OVERLAP, NORMS, BOTH) for n in (0, 3)),
]


@pytest.mark.parametrize(
    ("family", "n_tp", "cells"),
    [
        ("llama", 2, EVERYTHING),
        pytest.param("llama", 3, EVERYTHING, marks=full),
        ("llama_tied_shared", 2, [OVERLAP, NORMS, BOTH]),
        ("llama_tied_shared", 3, [BOTH]),
        *(
            pytest.param(family, 2, [OVERLAP, BOTH], marks=() if family in ("gpt2", "phi") else full)
            for family in ("qwen3", "gpt2", "gpt_neox", "gptj", "phi", "phi3", "starcoder2")
        ),
        *(
            pytest.param(family, 2, [OVERLAP], marks=() if family in ("mixtral", "bloom") else full)
            for family in ("mixtral", "deepseek_v3", "opt", "bloom", "falcon", "granite")
        ),
    ],
)
def test_the_training_of_one_process(family: str, n_tp: int, cells: list[dict]) -> None:
    weights, norms = plain(family)
    for of_rank in run_ranks(n_tp, body, family, cells, preload="tests.deepspeed_c.inject.preload"):
        for cell, (got, got_norms) in zip(cells, of_rank, strict=True):
            torch.testing.assert_close(got_norms, norms, rtol=2e-4, atol=0, msg=f"{cell} {got_norms} {norms}")
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-3, atol=5e-5, msg=lambda m: f"{cell} {name} {m}")  # noqa: B023


def order_body(rank: int, world: int, section: dict, more: dict):
    """The events of a forward and of a backward, in order: starts of sums, waits and computations."""
    events: list[str] = []
    start, wait, weights = exchange.sum_start, exchange.wait, overlap._Weights.backward
    sum_ = exchange.sum_

    def started(x, comm, label):
        events.append(f"start {label}")
        return start(x, comm, label)

    def summed(x, comm, label, *, waits=True):
        events.append(f"{'sum' if waits else 'start'} {label}")
        return sum_(x, comm, label, waits=waits)

    def waited(x):
        events.append("wait")
        return wait(x)

    def computed(ctx, grad):
        events.append("weights")
        return weights(ctx, grad)

    config = {**make_config(autotp_size=world, **section), **more}
    with engine_of(make("llama").train(), config) as engine:
        exchange.sum_start, exchange.wait, exchange.sum_ = started, waited, summed
        overlap._Weights.backward = staticmethod(computed)
        try:
            loss = engine(**batch(0, (2, 9))).loss
            forward, events[:] = list(events), []
            update(engine, loss)
        finally:
            exchange.sum_start, exchange.wait, exchange.sum_ = start, wait, sum_
            overlap._Weights.backward = staticmethod(weights)
    return forward, events


def test_halves_run_in_turn_and_sums_travel_under_the_weights_gradients() -> None:
    """Gathers of weights at stage 3 do not change the order."""
    for more in ({}, stage(3)):
        forward, backward = run_ranks(2, order_body, OVERLAP, more, preload="tests.deepspeed_c.inject.preload")[0]
        region = ["start output of model.layers.0.{0}", "start output of model.layers.0.{0}", "wait", "wait"]
        expected = [line.format(part) for part in ("self_attn.o_proj", "mlp.down_proj") for line in region]
        assert forward[1 : 1 + len(expected)] == expected, forward
        # Down to the first layer, the sum of one half of the batch overlaps with the other half. The sum of the last
        # half overlaps with gradients of weights.
        gradient = "start input gradient of model.layers.0.mlp"
        at = backward.index(gradient)
        assert backward[at : at + 8] == [gradient, "weights", "weights", gradient, "weights", "weights", "wait", "wait"]
        head = backward.index("start input gradient of lm_head")
        assert backward[head : head + 3] == ["start input gradient of lm_head", "weights", "wait"], backward


def bytes_body(rank: int, world: int, section: dict, shapes: list[tuple[int, int]]):
    found = []
    with engine_of(make("llama").train(), make_config(autotp_size=world, **section)) as engine:
        ledger = engine._mesh.along("tp").ledger
        for step, shape in enumerate([(2, 9), *shapes]):  # in the first step ranks also compare their data
            before = {op: total.n_bytes for op, total in ledger.totals.items()}
            engine.backward(engine(**batch(step, shape)).loss)
            found.append({op: total.n_bytes - before.get(op, 0) for op, total in ledger.totals.items()})
            engine.step()
    return found[1:]


@pytest.mark.parametrize("section", [{}, OVERLAP, NORMS, BOTH], ids=["plain", "overlap", "norms", "both"])
def test_bytes_are_those_of_the_formula(section: dict) -> None:
    n_layers, width, world = 2, 48, 3
    for of_rank in run_ranks(world, bytes_body, section, list(SHAPES), preload="tests.deepspeed_c.inject.preload"):
        for (n_samples, n_tokens), sent in zip(SHAPES, of_rank, strict=True):
            tensor = 4 * n_samples * n_tokens * width
            loss = world * 4 * 4 * n_samples * n_tokens  # each rank sends four numbers a token
            if "sequence_parallel_norms" in section:
                tokens = world * 4 * n_samples * -(-n_tokens // world) * width
                # Each layer has two regions, in forward and in backward. Two more gathers are for the begin of the
                # residual stream in backward and for its end in forward.
                expected = {"all-gather": (4 * n_layers + 2) * tokens + loss, "reduce-scatter": 4 * n_layers * tokens}
                norms = 4 * (2 * n_layers + 1) * 64  # gradients of weights of norms, each padded to a line
                expected["all-reduce"] = 2 * tensor + norms  # the table in forward, the head in backward
            else:
                expected = {"all-gather": loss, "all-reduce": (4 * n_layers + 2) * tensor}
            assert {op: n for op, n in sent.items() if n} == expected, (n_samples, n_tokens)


def drop_body(rank: int, world: int, recompute: dict):
    """Dropout on residuals: each rank draws masks for its own tokens, and recomputation draws the same masks again."""
    model = make("gpt2").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    torch.manual_seed(5)
    norms = []
    with engine_of(model, {**make_config(autotp_size=world, **BOTH), **recompute}) as engine:
        for step in range(STEPS):
            update(engine, engine(**batch(step, (2, 9))).loss)
            norms.append(engine.get_global_grad_norm())
        return norms, torch.rand(3).tolist()


def test_dropout_outside_the_region_is_the_ranks_own_and_ends_with_the_stream() -> None:
    kept, again = (run_ranks(2, drop_body, more, preload="tests.deepspeed_c.inject.preload") for more in ({}, AGAIN))
    assert kept[0] == kept[1] and kept == again
    assert max(abs(a / b - 1) for a, b in zip(kept[0][0], plain("gpt2")[1])) > 0.01


@on_ranks(2, preload="tests.deepspeed_c.inject.preload")
def test_what_norms_on_own_tokens_cannot_do_is_said_before_anything_is_cut(rank: int, world: int) -> None:
    for family, said in (("opt", "no policy says where tokens flow"), ("bert", "no policy says")):
        with pytest.raises(ModelError, match=said):
            deepspeed_c.initialize(model=make(family).train(), config=make_config(autotp_size=world, **NORMS))
    model = make("llama").train()
    skip = {"layer_specs": [{"patterns": [r".*layers\.1\.mlp.*weight"], "partition_type": "skip"}]}
    section = {"autotp_size": world, **NORMS, "partition_config": skip}
    with pytest.raises(ModelError, match=r"layers\.1\.mlp: it has layers of another kind"):
        deepspeed_c.initialize(model=model, config=make_config(**section))
    assert not any(hasattr(param, "tp_cut") for param in model.parameters())
    with engine_of(model, make_config(autotp_size=world, **NORMS)) as engine:
        with pytest.raises(StateError, match="own tokens of hidden states"):
            engine(**batch(0, (2, 9)), output_hidden_states=True)
        engine.eval()
        with torch.no_grad():
            hidden = engine(**batch(0, (2, 9)), output_hidden_states=True).hidden_states
        assert hidden[-1].shape == (2, 9, 48)
    again = {**make_config(autotp_size=world, **NORMS), **AGAIN}
    with engine_of(make("llama").train(), again) as engine:
        first = engine(**batch(0, (2, 9))).loss
        engine(**batch(0, (2, 12)))
        with pytest.raises(StateError, match=r"tokens are here, and the last forward began with \[6, 6\]"):
            engine.backward(first)


def cache_body(rank: int, world: int):
    """A cache that two halves of the batch fill holds the whole batch."""
    found = []
    for section in ({}, OVERLAP):
        model = make("llama").train()
        with engine_of(model, make_config(autotp_size=world, **section)) as engine:
            output = engine(**batch(0, (3, 10)), use_cache=True)
            found.append([(layer.keys.detach(), layer.values.detach()) for layer in output.past_key_values.layers])
    return found


def test_a_cache_is_filled_by_both_halves() -> None:
    for usual, halves in run_ranks(2, cache_body, preload="tests.deepspeed_c.inject.preload"):
        for tensors, others in zip(usual, halves, strict=True):
            for tensor, other in zip(tensors, others, strict=True):
                assert tensor.shape[0] == 3
                torch.testing.assert_close(other, tensor)


def test_a_half_has_its_samples_of_each_argument() -> None:
    """A vector has a number for each token, also of a sequence with as many tokens as the batch has samples."""
    x, mask, positions = torch.randn(3, 3, 4), torch.randn(3, 1, 3, 3), torch.arange(3)
    of_one = torch.randn(1, 1, 3, 3)  # for all samples
    args, kwargs = overlap._part_of(((x, "a"), {"m": [mask, of_one], "p": positions}), 1, 3, 3, [])
    assert torch.equal(args[0], x[1:]) and args[1] == "a"
    assert torch.equal(kwargs["m"][0], mask[1:]) and torch.equal(kwargs["m"][1], of_one)
    assert torch.equal(kwargs["p"], positions), (kwargs["p"], positions)


@on_ranks(2)
def test_operators_have_schemas_and_fakes(rank: int, world: int) -> None:
    comm = Collectives()
    number, x, mine = exchange.number_of(comm), torch.randn(2, 5, 3), torch.randn(2, (3, 2)[rank], 3)
    ops = torch.ops.deepspeed_c
    # Operations under way stand in a table of the operators, which tracing does not see. So wait for the results here.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op, arguments in (
        (ops.tp_sum_, (x.clone(), number, "x")),
        (ops.tp_sum_start, (x, number, "x")),
        (ops.tp_sum_start_, (x.clone(), number, "x")),
        (ops.tp_gather_start, (mine, [3, 2], 1, number, "x")),
        (ops.tp_scatter_start, (x, [3, 2], 1, number, "x")),
        (ops.tp_wait_, (torch.randn(2),)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)
        exchange.settle()
    torch.manual_seed(0)
    parts = torch.randn(world, 2, 5, 3)
    total = exchange.wait(exchange.scatter_start(parts[rank], [3, 2], 1, comm, "x"))
    assert total.shape == (2, 3, 3)
    assert (
        torch.equal(total[:, : (3, 2)[rank]], parts.sum(0).split([3, 2], 1)[rank])
        and not total[:, (3, 2)[rank] :].any()
    )
    pieces = parts[0].split([3, 2], 1)
    whole = exchange.gathered(exchange.wait(exchange.gather_start(pieces[rank], [3, 2], 1, comm, "x")), [3, 2], 1)
    assert torch.equal(whole, parts[0])
    with pytest.raises(ModelError, match="float64 cannot be summed"):
        exchange.sum_start(x.double(), comm, "x")


def variant_body(rank: int, world: int, section: dict, kind: str):
    """The losses and weights of a few steps of a model that is trained in the unusual way ``kind``."""
    model = make("llama").train()
    more: dict = {}
    if kind == "bf16":
        more = {"bf16": {"enabled": True}}
    elif kind == "autocast":
        more = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    elif kind == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in ("q_proj", "gate_proj", "input_layernorm")))
    elif kind == "accumulated":
        more = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    losses = []
    with engine_of(model, {**make_config(autotp_size=world, **section), **more}) as engine:
        for step in range(4):
            losses.append(update(engine, engine(**batch(step, (2, 9))).loss))
        return losses, {name: value.clone() for name, value in engine.module_state_dict().items()}


@pytest.mark.parametrize("kind", ["bf16", "autocast", "frozen", "accumulated"])
def test_other_ways_to_train_compute_the_same_each_time(kind: str) -> None:
    usual, twice = run_ranks(2, variant_body, {}, kind, preload="tests.deepspeed_c.inject.preload")[0], []
    for section in (OVERLAP, BOTH, BOTH):
        twice.append(run_ranks(2, variant_body, section, kind, preload="tests.deepspeed_c.inject.preload"))
        losses, weights = twice[-1][0]
        tolerance = 2e-2 if kind in ("bf16", "autocast") else 1e-5
        assert losses == pytest.approx(usual[0], rel=tolerance), section
        if kind in ("frozen", "accumulated"):
            for name, value in usual[1].items():
                torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=5e-5, msg=lambda m: f"{name} {m}")  # noqa: B023
        if kind == "frozen":
            whole = dict(make("llama").named_parameters())
            assert all(torch.equal(weights[name], value) for name, value in whole.items() if "q_proj" in name)
    for (losses, weights), (again, same) in zip(twice[1], twice[2], strict=True):
        assert losses == again and all(torch.equal(value, same[name]) for name, value in weights.items())


@on_ranks(2, preload="tests.deepspeed_c.inject.preload")
def test_a_graph_that_is_kept_is_gone_through_twice_or_says_why_not(rank: int, world: int):
    """The gradients of two backwards through one graph. This works up to the point where logits are cut."""
    found = []
    for section in ({}, OVERLAP):
        model = make("llama").train()
        cut_model(model, TensorParallel(**section), Collectives())
        hidden = model.model(batch(0, (2, 9))["input_ids"]).last_hidden_state
        hidden.square().sum().backward(retain_graph=True)
        once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        hidden.square().sum().backward()
        for name, grad in once.items():
            torch.testing.assert_close(model.get_parameter(name).grad, 2 * grad)
        found.append(once)
        loss = model(**batch(0, (2, 9))).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="inplace|in place"):
            loss.backward()  # the first backward overwrote the logits with their gradient
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad)
