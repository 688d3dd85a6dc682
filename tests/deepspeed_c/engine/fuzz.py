"""Random runs of an engine, in which users' calls come in any combination and at any moment. Each is compared with the
reference that rounds where the engine rounds (``tests/deepspeed_c/zero/reference.py``).

    python -m tests.deepspeed_c.engine.fuzz --cases 1000 --seed 1

A case is a dict of settings, drawn from its seed. A failing case is shrunk by putting its settings back to their
defaults one at a time, as long as the case still fails. Then the case is printed with the command that runs it alone.
16-bit runs have to match bit for bit, and fp32 runs to a few ulp of the sums over ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c import utils
from deepspeed_c.engine import products
from deepspeed_c.offload import place
from deepspeed_c.ops.product_times import ProductTimes
from deepspeed_c.ops.products import widen_products
from tests.deepspeed_c.zero.reference import Event, Reference, flow_of, recorded
from tests.ranks import RanksFailed, run_ranks
from tests.training import engine_of

__all__ = ["CHOICES", "check_case", "draw", "main", "shrink"]

Case = dict[str, Any]

# Setting -> its values. The first is the default and the simplest; all are drawn from, and likely values stand twice.
CHOICES: dict[str, list[Any]] = {
    "world": [1, 2, 2, 3], "stage": [0, 1, 2, 3, 3], "gas": [1, 2, 3],
    "precision": ["fp32", "fp32", "bf16", "bf16", "fp16", "fp16_dynamic", "bf16_masters"],
    "accumulates_in_fp32": [False, False, True], "groups": [1, 2], "clip": [0.0, 0.1], "tied": [False, True],
    "frozen": [False, False, True], "unused": [False, False, True], "reentrant": [False, False, False, True],
    "bucket": [100_000, 40, 120], "threshold": [0, 0, 20], "overlap": [True, False],
    "reduce_scatter": [True, True, False], "offload": ["none", "none", "cpu", "super", "nvme", "ratio", "ratio_nvme"],
    "offload_params": ["none", "none", "cpu", "nvme"], "apart": [False, True], "parts": [1, 1, 2],
    "user_backward": [False, False, True], "no_sync": [False, False, True],
    "evaluation": ["none", "none", "no_grad", "grad"], "penalty": [False, False, False, True],
    "new_lr": [False, False, True], "edit": ["none", "none", "none", "grad", "master", "master_between", "state"],
    "trainable": [False, False, False, True], "load": ["none", "none", "full", "weights", "module"],
    "moment": ["start", "within", "between"], "products": ["torch", "widened"],
}  # fmt: skip
STEPS = 4
ADAMW = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SCALE_WINDOW = 2
# fp32 needs it: stage 0 sums over ranks in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16_masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 256.0}},
    # The first steps overflow.
    "fp16_dynamic": {
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": SCALE_WINDOW}
    },
}


def draw(seed: int) -> Case:
    """The case of a seed. Settings that have no effect or are refused are put back to their defaults."""
    rng = random.Random(seed)
    return settled({name: rng.choice(values) for name, values in CHOICES.items()})


def settled(case: Case) -> Case:
    case = dict(case)
    default = {name: values[0] for name, values in CHOICES.items()}
    if case["stage"] < 3:
        case["offload_params"], case["threshold"] = default["offload_params"], default["threshold"]
    if case["stage"] == 0:
        case["offload"] = "none"
        case["reduce_scatter"] = True
    if case["precision"] == "bf16_masters" and case["stage"] == 0:
        case["precision"] = "bf16"  # refused
    if case["offload"] == case["offload_params"] == "none":
        case["apart"] = False
    if case["precision"] == "fp32":
        case["accumulates_in_fp32"], case["products"] = False, default["products"]
    if case["edit"] == "state" and case["precision"] == "fp16_dynamic":
        case["edit"] = "master"  # there may be no state to edit: perhaps no step was applied yet
    if case["load"] == "none":
        case["moment"] = "start"
    if case["moment"] == "within" and case["gas"] == 1:
        case["moment"] = "between"
    if case["reentrant"]:
        case["penalty"] = False  # torch refuses autograd.grad through it
    if case["penalty"] and case["precision"].startswith("fp16"):
        case["user_backward"] = False  # refused: all of the loss has to be scaled
    return case


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inp = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.mid = nn.Linear(9, 6, bias=False)
        self.loop = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.side = nn.Linear(3, 2)
        self.uses_side, self.is_reentrant = not case["unused"], case["reentrant"]
        if case["tied"]:
            self.out.weight = self.embed.weight
        if case["frozen"]:
            self.mid.weight.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) + x
        for _ in range(2):
            h = checkpoint(self._again, h, use_reentrant=True) if self.is_reentrant else self._again(h)
        h = self.mid(torch.tanh(self.norm(self.inp(h)))) * self.gain
        loss = nn.functional.cross_entropy(self.out(h).float(), tokens.roll(1))
        return loss + 0.1 * self.side.weight.float().square().sum() if self.uses_side else loss

    def _again(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.loop(h))


def make(case: Case) -> Model:
    torch.manual_seed(3)
    return Model(case)


def groups_of(model: nn.Module, case: Case) -> list[dict]:
    params = [p for p in model.parameters() if p.requires_grad]
    if case["groups"] == 1:
        return [{"params": params}]
    return [
        {"params": params[::2], "lr": 0.01, "betas": (0.7, 0.9), "weight_decay": 0.0},
        {"params": params[1::2], "lr": 0.03, "betas": (0.9, 0.95), "weight_decay": 0.2},
    ]


def data(step: int, micro: int, rank: int, part: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + 100 * micro + 10 * rank + part)
    return torch.randn(5, 6, generator=g).to(dtype), torch.randint(0, 11, (5,), generator=g)


def config_of(case: Case, folder: str) -> dict:
    zero: dict[str, Any] = {
        "stage": case["stage"], "stage3_param_persistence_threshold": case["threshold"],
        "reduce_bucket_size": case["bucket"], "overlap_comm": case["overlap"], "reduce_scatter": case["reduce_scatter"],
    }  # fmt: skip
    offload = case["offload"]
    if offload != "none":
        device = "nvme" if offload.endswith("nvme") else "cpu"
        zero["offload_optimizer"] = {"device": device, "nvme_path": folder}
        if offload == "super":
            zero["offload_optimizer"]["super_offload"] = True
        if offload.startswith("ratio"):
            zero["offload_optimizer"]["ratio"] = 0.5
    if case["offload_params"] != "none":
        zero["offload_param"] = {"device": case["offload_params"], "nvme_path": folder}
        if case["offload_params"] == "nvme":
            zero["offload_param"]["max_in_cpu"] = 50
    return {
        "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": case["gas"],
        "gradient_clipping": case["clip"], "optimizer": {"type": "AdamW", "params": ADAMW}, "zero_optimization": zero,
        **({"data_types": {"grad_accum_dtype": "fp32"}} if case["accumulates_in_fp32"] else {}),
        **PRECISIONS[case["precision"]],
    }  # fmt: skip


def machine_of(case: Case) -> AbstractContextManager:
    """A machine on which products of 16-bit elements are widened or not, as the case says, whatever it would measure."""
    times = ProductTimes(1.0, 1e-3) if case["products"] == "widened" else ProductTimes(1e-3, 1e-3)
    return mock.patch.object(products, "product_times", lambda dtype: times)


# ---- the acts of a run, by an engine and by the reference ------------------------------------------------------------

# The names and patterns passed to set_trainable at the beginning of steps 1 and 3.
TRAINED = {1: ["inp.*", "gain", "loop.weight"], 3: ["*"]}
# The parameter that is edited. Every case uses and trains it.
EDITED = "inp.weight"


def acts(case: Case) -> Iterator[tuple]:
    """The run as a list of acts, each a name and arguments."""
    gas = case["gas"]

    def window(step: int, n_micros: int = gas, *, steps: bool = True) -> Iterator[tuple]:
        for micro in range(n_micros):
            is_last = micro == gas - 1
            for part in range(case["parts"]):
                yield "backward", step, micro, part, case["no_sync"] and not is_last
            if is_last and steps:
                if case["edit"] == "grad" and step == 1:
                    yield ("edit_grad",)
                if case["edit"] == "master_between" and step == 1:
                    yield ("edit_master",)
            if not is_last or steps:
                yield "step", is_last

    for step in range(STEPS):
        if case["trainable"] and step in TRAINED:
            yield "trainable", TRAINED[step]
        if case["load"] != "none" and step == 1:
            yield ("save",)
        if case["new_lr"] and step == 2:
            yield ("new_lr",)
        if case["edit"] == "master" and step == 1:
            yield ("edit_master",)
        if case["edit"] == "state" and step == 3:
            yield ("edit_state",)
        if case["load"] != "none" and step == 2:
            if case["moment"] == "within":
                yield from window(9, gas - 1)
            if case["moment"] == "between":
                yield from window(9, steps=False)
            yield "load", case["load"]
        yield from window(step)


def penalised(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * slope.float().square().sum()


class Outcome(NamedTuple):
    losses: list[float]
    applied: list[bool]
    weights: dict[str, torch.Tensor]
    order: list[Event] = []  # noqa: RUF012  (an engine's)


def engine_outcome(rank: int, world: int, case: Case, folder: str, planted: dict) -> Outcome:
    """``planted``: wrong options that the optimizer is given on purpose."""
    with mock.patch.object(place, "is_apart", lambda device: case["apart"]), machine_of(case), recorded() as order:
        model = make(case)
        engine = engine_of(model, config_of(case, folder), model_parameters=groups_of(model, case))
        with engine:
            for group in engine.optimizer.param_groups:
                group.update(planted)
            return _drive(engine, rank, case, folder)._replace(order=order)


def _drive(engine: Any, rank: int, case: Case, folder: str) -> Outcome:
    model = engine.module
    named = dict(model.named_parameters())
    dtype = engine._optimizer.units[0].dtype
    losses, applied = [], []

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad() if case["evaluation"] == "no_grad" else nullcontext():
            engine(*data(77, 0, rank, 0, dtype))
        engine.train()

    for act, *args in acts(case):
        if act == "backward":
            step, micro, part, waits = args
            with engine.no_sync() if waits else nullcontext():
                x, tokens = data(step, micro, rank, part, dtype)
                loss = engine(x.requires_grad_(case["penalty"]), tokens)
                if case["penalty"]:
                    loss = penalised(loss, x)
                losses.append(loss.item())
                if case["evaluation"] != "none" and micro == 0:
                    evaluate()
                loss.backward() if case["user_backward"] else engine.backward(loss)
        elif act == "step":
            engine.step()
            if args[0]:
                applied.append(engine.was_step_applied())
            if case["evaluation"] != "none":
                evaluate()
        elif act == "edit_grad":
            utils.safe_set_full_grad(named[EDITED], 2 * utils.safe_get_full_grad(named[EDITED]))
        elif act == "edit_master":
            utils.safe_set_full_fp32_param(named[EDITED], 0.5 * utils.safe_get_full_fp32_param(named[EDITED]))
        elif act == "edit_state":
            moment = utils.safe_get_full_optimizer_state(named[EDITED], "exp_avg")
            utils.safe_set_full_optimizer_state(named[EDITED], 0.5 * moment, "exp_avg")
        elif act == "new_lr":
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5
        elif act == "trainable":
            engine.set_trainable(args[0])
        elif act == "save":
            engine.save_checkpoint(folder, tag="saved")
        elif act == "load":
            options = {"full": {}, "weights": {"load_optimizer_states": False}, "module": {"load_module_only": True}}
            engine.load_checkpoint(folder, tag="saved", **options[args[0]])
    weights = {}
    for name, p in named.items():
        weights[name] = utils.safe_get_full_fp32_param(p)
        if weights[name] is None:
            with deepspeed_c.zero.GatheredParameters(p):
                weights[name] = p.detach().float().clone()
    return Outcome(losses, applied, weights)


class Scale:
    """DeepSpeed's dynamic loss scale, with a hysteresis of 1."""

    def __init__(self, scale: float) -> None:
        self.scale, self.n_steps, self.last_overflow = scale, 0, -1

    def update(self, has_overflow: bool) -> None:
        n_good = self.n_steps - self.last_overflow - 1
        if has_overflow:
            self.scale /= 2
            self.last_overflow = self.n_steps
        elif n_good and n_good % SCALE_WINDOW == 0:
            self.scale *= 2
        self.n_steps += 1


def reference_outcomes(case: Case, outcomes: list[Outcome]) -> list[Outcome]:
    """The outcome that each rank should have got."""
    world, model = case["world"], make(case)
    flow = flow_of(config_of(case, ""), world, model)._replace(by_caller=case["user_backward"])
    reference = Reference(model, groups_of(model, case), flow, world, ADAMW, [outcome.order for outcome in outcomes])
    scale = Scale(reference.loss_scale)
    edited = dict(model.named_parameters())[EDITED]
    losses: list[list[float]] = [[] for _ in range(world)]
    applied, saved = [], None
    for act, *args in acts(case):
        reference.loss_scale = scale.scale
        if act == "backward":
            step, micro, part, _ = args

            def loss_of(rank: int, at=(step, micro), part=part) -> torch.Tensor:
                x, tokens = data(*at, rank, part, flow.dtype)
                loss = model(x.requires_grad_(case["penalty"]), tokens)
                return penalised(loss, x) if case["penalty"] else loss

            for rank, loss in enumerate(reference.backward(loss_of)):
                losses[rank].append(loss)
        elif act == "step" and args[0]:
            applied.append(reference.step())
            if case["precision"] == "fp16_dynamic":
                scale.update(not applied[-1])
        elif act == "edit_grad":
            reference.finish()
            value = 2 * reference.gradient(edited)
            reference.sums[edited] = (value / reference.gradient_factor).to(flow.accum)
        elif act == "edit_master":
            reference.set_master(edited, 0.5 * reference.masters[edited].float())
        elif act == "edit_state":
            if edited in reference.states:
                state = reference.states[edited]
                state["exp_avg"] = (0.5 * state["exp_avg"].float()).to(flow.state)
        elif act == "new_lr":
            for group in reference.groups:
                group["lr"] *= 0.5
        elif act == "trainable":
            reference.set_trainable(args[0])
        elif act == "save":
            saved = reference.snapshot(), (scale.scale, scale.n_steps, scale.last_overflow)
        elif act == "load":
            reference.drop()
            reference.restore(saved[0], optimizer=args[0] == "full")
            if args[0] == "full":
                scale.scale, scale.n_steps, scale.last_overflow = saved[1]
    return [Outcome(of_rank, applied, reference.weights()) for of_rank in losses]


def check_case(case: Case, *, planted: dict | None = None, timeout: float = 60.0) -> str:
    """A description of the case's failure; empty if there is none."""
    with tempfile.TemporaryDirectory(prefix="dsc_fuzz_") as folder:
        try:
            gots = run_ranks(case["world"], engine_outcome, case, folder, planted or {}, timeout=timeout)
        except RanksFailed as error:
            return str(error)
    try:
        with ExitStack() as stack:
            if case["products"] == "widened":  # the reference rounds where the engine rounds
                stack.callback(widen_products((torch.bfloat16, torch.float16)))
            wants = reference_outcomes(case, gots)
    except AssertionError as error:
        return str(error)
    return next(filter(None, (_difference(case, rank, *both) for rank, both in enumerate(zip(gots, wants)))), "")


def _difference(case: Case, rank: int, got: Outcome, want: Outcome) -> str:
    if got.applied != want.applied:
        return f"rank {rank}: steps applied are {got.applied}, should be {want.applied}"
    is_exact = case["precision"] != "fp32"
    found = []
    for name, b in want.weights.items():
        a = got.weights[name]
        if not (torch.equal(a, b) if is_exact else torch.allclose(a, b, **CLOSE)):
            found.append(f"{name} by {(a - b).abs().max().item():g}")
    for i, (a, b) in enumerate(zip(got.losses, want.losses)):
        if not (a == b if is_exact else math.isclose(a, b, rel_tol=CLOSE["rtol"], abs_tol=CLOSE["atol"])):
            found.append(f"loss {i} by {a - b:g}")
            break
    return f"rank {rank} is off: {', '.join(found)}" if found else ""


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Put each setting back to its default where the case still fails with the default."""
    has_changed = True
    while has_changed:
        has_changed = False
        for name, values in CHOICES.items():
            for value in dict.fromkeys(values):
                if value == case[name]:
                    break  # earlier values are simpler
                simpler = settled({**case, name: value})
                if simpler != case and fails(simpler):
                    case, has_changed = simpler, True
                    break
    return case


def told(case: Case) -> str:
    odd = {name: value for name, value in case.items() if value != CHOICES[name][0]}
    return json.dumps(odd)


def parser_of(module: str, what: str) -> argparse.ArgumentParser:
    """The command-line options that ``cases_of`` reads."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=what)
    parser.add_argument("--cases", type=int, default=100, help="how many, of this seed and those that follow")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", help="one case, as JSON of the settings that are not the default")
    return parser


def cases_of(
    options: argparse.Namespace,
    choices: dict[str, list[Any]],
    draw: Callable[[int], Case],
    settled: Callable[[Case], Case],
) -> list[tuple[str, Case]]:
    """Labelled cases: the given case, or the drawn ones."""
    if options.case:
        default = {name: values[0] for name, values in choices.items()}
        return [("case", settled({**default, **json.loads(options.case)}))]
    return [(f"seed {seed}", draw(seed)) for seed in range(options.seed, options.seed + options.cases)]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("tests.deepspeed_c.engine.fuzz", __doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="tell failing cases as they were drawn")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = cases_of(options, CHOICES, draw, settled)
    n_failed, began = 0, time.monotonic()
    for label, case in cases:
        problem = check_case(case)
        if not problem:
            continue
        n_failed += 1
        print(f"{label} fails: {told(case)}\n  {problem[-1500:]}", flush=True)
        if not options.keep and not options.case:
            case = shrink(case, lambda simpler: bool(check_case(simpler)))
            print(f"  shrunk, {check_case(case)[-1500:]}", flush=True)
        print(f"  python -m tests.deepspeed_c.engine.fuzz --case '{told(case)}'", flush=True)
    print(f"{len(cases)} cases, {n_failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if n_failed else 0


if __name__ == "__main__":
    # Run the module under its importable name, because ranks import their function by that name.
    from tests.deepspeed_c.engine import fuzz

    sys.exit(fuzz.main())
