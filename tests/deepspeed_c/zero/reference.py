"""Plain torch in one process that rounds where the engine rounds: 16-bit runs are compared with it bit for bit.

Tolerances wide enough for 16-bit training would also pass wrong optimizers: weight decay changes a weight by only a
thousandth in a step. So the reference follows each rounding. Gradients have the dtype of the weights, accumulate in
``accum``, travel in ``comm``, and are summed in fp32 in the order of ranks and rounded once. One factor averages,
unscales and clips. The update is fp32, and the master is rounded to the weight. The reference has no shards, buckets or
homes, because none of them may change a bit. In fp32 it is itself compared with torch.optim (test_reference.py).

The engine decides when gradients are sent. This shows in the last bit: in 16 bits several gradients of a window
may be added before or after they are sent. So the events of an engine are ``recorded``, and the reference follows them.
The engine must have taken and sent each gradient of the reference exactly once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from deepspeed_c.zero.gradients.bucket import Bucket
from deepspeed_c.zero.layout.unit import Slot, Unit
from tests.deepspeed_c.zero.gradients.hooks import Hook, wrapped

__all__ = ["Event", "Flow", "Reference", "flow_of", "recorded"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Event(NamedTuple):
    """An event in the engine of a rank: it adds the gradient of ``names`` to the sum in ``dtype`` ("add"), reduces the
    sum ("reduce"), or ends a window ("reset")."""

    kind: str
    names: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    is_apart: bool = False  # sums and gradients lie in different memory


@contextmanager
def recorded(*engines: Any) -> Iterator[list[Event]]:
    """Record the events of ``engines`` and of engines made meanwhile. Windows without gradients are left out."""
    events: list[Event] = []
    open_bucket, reduce, reset = Bucket.open, Bucket.reduce, Bucket.reset
    n_adds = 0
    dtypes: dict[tuple[Unit, int], torch.dtype] = {}

    def open_and_note(bucket: Bucket, will_reduce: bool) -> torch.Tensor:
        staging = open_bucket(bucket, will_reduce)
        dtypes[bucket.unit, bucket.index] = staging.dtype
        return staging

    def telling(slot: Slot, hook: Hook) -> Hook:
        def hook_and_tell(param: torch.Tensor) -> None:
            nonlocal n_adds
            if param.grad is None:
                return hook(param)
            n_adds += 1
            at = len(events)  # this event comes before the reduction that the hook may start
            events.append(Event("add", (slot.name,)))
            hook(param)
            events[at] = events[at]._replace(dtype=dtypes[slot.unit, slot.bucket])
            return None

        return hook_and_tell

    def reduce_and_tell(bucket: Bucket) -> Any:
        names, is_apart = tuple(slot.name for slot in bucket.slots), bucket.unit.states.is_apart
        events.append(Event("reduce", names, is_apart=is_apart))
        return reduce(bucket)

    def reset_and_tell(bucket: Bucket) -> None:
        nonlocal n_adds
        reset(bucket)
        if n_adds:
            events.append(Event("reset"))
        else:
            while events and events[-1].kind == "reduce":
                events.pop()
        n_adds = 0

    with (
        wrapped(telling, *engines),
        mock.patch.object(Bucket, "open", open_and_note),
        mock.patch.object(Bucket, "reduce", reduce_and_tell),
        mock.patch.object(Bucket, "reset", reset_and_tell),
    ):
        yield events


class Flow(NamedTuple):
    """The dtypes of each kind of number, and the factors and ways of sums."""

    dtype: torch.dtype = torch.float32  # of weights, activations, gradients
    accum: torch.dtype = torch.float32  # of sums of gradients
    comm: torch.dtype = torch.float32  # of gradients that are sent
    master: torch.dtype = torch.float32
    state: torch.dtype = torch.float32  # of moments
    autocast: torch.dtype | None = None
    loss_scale: float | None = None
    pre_factor: float = 1.0  # multiplies gradients before the sum over ranks
    gas: int = 1
    clip: float = 0.0
    stage: int = 0
    reduce_scatter: bool = True
    sparse: bool = False  # embeddings' gradients are sent by rows
    is_offloaded: bool = False
    by_caller: bool = False  # loss.backward() instead of engine.backward(loss)
    alone: frozenset[str] = frozenset()  # parameters whose gradients are sent in ``dtype`` under autocast


def flow_of(config: Mapping[str, Any], world: int, model: nn.Module) -> Flow:
    """The flow that a configuration asks for."""
    zero, types = config.get("zero_optimization", {}), config.get("data_types", {})
    bf16, fp16, auto = (config.get(name, {}) for name in ("bf16", "fp16", "torch_autocast"))
    dtype = torch.bfloat16 if bf16.get("enabled") else torch.float16 if fp16.get("enabled") else torch.float32
    autocast = DTYPES[{"bfloat16": "bf16", "float16": "fp16"}[auto["dtype"]]] if auto.get("enabled") else None
    keeps_16bit = bf16.get("bf16_master_weights_and_grads", False)
    is_scaled = torch.float16 in (dtype, autocast)
    comm = DTYPES.get(config.get("communication_data_type", ""))
    linear = {
        f"{at}.{name}" if at else name
        for at, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for name, _ in module.named_parameters(recurse=False)
    }
    # Host memory has room for gradients that accumulate in fp32.
    is_offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    accum = types.get("grad_accum_dtype") or ("fp32" if is_offloaded or bf16.get("immediate_grad_update") else None)
    pre = 1.0 / config.get("gradient_predivide_factor", 1.0) if world > 1 else 1.0
    return Flow(
        dtype=dtype,
        accum=DTYPES[accum] if accum else dtype,
        comm=comm or autocast or dtype,
        master=dtype if keeps_16bit else torch.float32,
        state=dtype if bf16.get("bf16_optimizer_states") else torch.float32,
        autocast=autocast,
        loss_scale=(fp16.get("loss_scale") or 2.0 ** fp16.get("initial_scale_power", 16)) if is_scaled else None,
        pre_factor=1.0 / world if config.get("prescale_gradients") else pre,
        gas=config["gradient_accumulation_steps"],
        clip=config["gradient_clipping"],
        stage=zero.get("stage", 0),
        reduce_scatter=zero.get("reduce_scatter", True),
        sparse=config.get("sparse_gradients", False),
        is_offloaded=is_offloaded,
        alone=frozenset() if autocast is None or comm else frozenset(n for n, _ in model.named_parameters() if n not in linear),
    )  # fmt: skip


def _f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


class Reference:
    """A model and its AdamW. Callers run its passes as they run those of an engine on each of ``world`` ranks.

    ``defaults``: options of ``torch.optim.AdamW``. ``groups``: as torch's. ``orders``: by rank, the events recorded
    from an engine in the same passes; without them all gradients are reduced at the end of a window. ``step`` ends a
    window. ``sums`` are the gradients as the engine stores them.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        flow: Flow,
        world: int,
        defaults: Mapping[str, Any],
        orders: Sequence[Sequence[Event]] | None = None,
    ) -> None:
        self.model, self.flow, self.world = model, flow, world
        self.names = {p: name for name, p in model.named_parameters()}
        self._params = {name: p for p, name in self.names.items()}
        self.groups = [{**defaults, **group, "params": list(group["params"])} for group in groups]
        self.sparse = {m.weight for m in model.modules() if isinstance(m, nn.Embedding) and flow.sparse and world > 1}
        self.masters = {p: p.detach().to(flow.master, copy=True) for p in self.trained()}
        self.states: dict[nn.Parameter, dict[str, Any]] = {}
        for p in model.parameters():
            p.data = p.data.to(flow.dtype, copy=True)
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._collect)
        self.loss_scale = flow.loss_scale or 1.0
        self.norm = math.nan
        self.is_skipped = False
        self._orders = None if orders is None else [list(events) for events in orders]
        self._at = [0] * world
        self._begin()

    def trained(self) -> list[nn.Parameter]:
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    # -- a window ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.used: set[nn.Parameter] = set()
        self._fired: list[list[tuple[nn.Parameter, torch.Tensor]]] = [[] for _ in range(self.world)]
        self._is_finished = False

    def drop(self) -> None:
        """Begin a new window and drop the gradients accumulated so far."""
        for rank in range(self.world if self._orders else 0):
            if self._fired[rank]:
                events = self._orders[rank]
                while self._at[rank] < len(events) and events[self._at[rank]].kind != "reset":
                    self._at[rank] += 1
                self._at[rank] += 1
        self._begin()

    @property
    def _is_divided_late(self) -> bool:
        """Whether the caller's loss is not divided, so that the optimizer has to divide gradients by the accumulation
        steps."""
        return self.flow.by_caller and not self.flow.loss_scale

    @property
    def _factor_in_loss(self) -> float:
        return 1.0 if self._is_divided_late else self.loss_scale / self.flow.gas

    @property
    def _is_shown(self) -> bool:
        """Whether gradients accumulate in ``param.grad``."""
        return self.flow.stage == 0 and self.flow.accum == self.flow.dtype and not self.flow.is_offloaded

    @property
    def gradient_factor(self) -> float:
        """The factor that turns ``sums`` into averaged gradients."""
        factor = 1.0 if self.flow.stage == 0 else self._post_factor
        return factor * (1.0 / self.flow.gas if self._is_divided_late and not self._is_shown else 1.0) / self.loss_scale

    @property
    def _post_factor(self) -> float:
        """The factor that makes the sum over ranks an average. Stage 0 applies it to the sums, because callers read
        them."""
        return 1.0 / (self.flow.pre_factor * self.world)

    def backward(self, loss_of: Callable[[int], torch.Tensor]) -> list[float]:
        """Runs one backward pass on every rank, from the loss ``loss_of(rank)``. Returns the losses."""
        losses = []
        for rank in range(self.world):
            self._rank, dtype = rank, self.flow.autocast
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(rank)
            losses.append(loss.item())
            (loss * self._factor_in_loss if self._factor_in_loss != 1.0 else loss).backward()
        return losses

    def _collect(self, p: nn.Parameter) -> None:
        """Takes a gradient when autograd has finished it, as an engine's hook does. A pass whose graph has several
        parts calls this more than once for a parameter."""
        self.used.add(p)
        is_divided = self._is_divided_late and self._is_shown and self.flow.gas > 1
        self._fired[self._rank].append((p, p.grad * (1.0 / self.flow.gas) if is_divided else p.grad))
        p.grad = None

    def finish(self) -> None:
        """Sums the gradients of the window over ranks, unless that is done already."""
        if self._is_finished:
            return
        self._is_finished = True
        queues: list[dict[nn.Parameter, list[torch.Tensor]]] = []
        for fired in self._fired:
            queues.append({})
            for p, grad in fired:
                queues[-1].setdefault(p, []).append(grad)
        gathered: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in queues]
        if self._orders is None:
            for queue, into in zip(queues, gathered):
                for p, grads in queue.items():
                    for grad in grads:
                        self._gather(into, p, grad, self.flow.accum)
                queue.clear()
            self._reduce(gathered, self.trained())
        is_open = self._orders is not None
        while is_open:
            # Ranks may take gradients in different orders, but all ranks send the same gradients at a time.
            sent = [self._follow(rank, queue, gathered[rank]) for rank, queue in enumerate(queues) if self._fired[rank]]
            is_open = bool(sent) and sent[0] is not None
            assert all(event == sent[0] for event in sent), f"ranks send gradients of {sent}"
            if is_open:
                params = [self._params[name] for name in sent[0].names]
                # A single rank sends nothing: its accumulated gradients are the sum, and go on accumulating.
                if self.world > 1 or sent[0].is_apart:
                    self._reduce(gathered, params, is_apart=sent[0].is_apart)
        if self.world == 1:
            self._reduce(gathered, self.trained())
        left = [self.names[p] for queue in queues for p, grads in queue.items() if grads]
        left += [self.names[p] for into in gathered for p in into]
        assert not left, f"the engine has not taken, or not sent, gradients of {left}"

    def _follow(
        self, rank: int, queue: dict[nn.Parameter, list[torch.Tensor]], into: dict[nn.Parameter, torch.Tensor]
    ) -> Event | None:
        """Adds up gradients as the engine of ``rank`` did until its next reduction. Returns the event of this
        reduction, or None at the end of the window."""
        events = self._orders[rank]
        while True:
            assert self._at[rank] < len(events), "the engine has had fewer windows"
            event = events[self._at[rank]]
            if event.kind == "reset":
                return None
            self._at[rank] += 1
            if event.kind == "reduce":
                return event
            p = self._params[event.names[0]]
            assert queue.get(p), f"the engine has taken more gradients of {event.names[0]} in a window than there were"
            self._gather(into, p, queue[p].pop(0), event.dtype)

    @staticmethod
    def _gather(
        into: dict[nn.Parameter, torch.Tensor], p: nn.Parameter, grad: torch.Tensor, dtype: torch.dtype
    ) -> None:
        if p in into:
            into[p].add_(grad)
        else:
            into[p] = grad.detach().to(dtype, copy=True)

    def _reduce(
        self,
        gathered: list[dict[nn.Parameter, torch.Tensor]],
        params: Sequence[nn.Parameter],
        *,
        is_apart: bool = False,
    ) -> None:
        for p in params:
            some = next((into[p] for into in gathered if p in into), None)
            if some is not None:
                parts = [into.pop(p) if p in into else torch.zeros_like(some) for into in gathered]
                self._add(p, parts, is_apart=is_apart)

    def _comm(self, p: nn.Parameter) -> torch.dtype:
        return self.flow.dtype if self.names[p] in self.flow.alone else self.flow.comm

    def _add(self, p: nn.Parameter, parts: list[torch.Tensor], *, is_apart: bool) -> None:
        """Add the sum of all ranks' accumulated gradients to ``sums``."""
        flow, comm = self.flow, self._comm(p)
        before = self.sums.get(p)
        if self.world == 1 and not is_apart:
            self.sums[p] = parts[0] if before is None else before.add_(parts[0])
            return
        if flow.pre_factor != 1.0:
            parts = [(part.float() * _f32(flow.pre_factor)).to(part.dtype) for part in parts]
        if p in self.sparse:
            total = torch.zeros_like(parts[0])
            for part in parts:
                total.add_(part)
            if flow.stage == 0:
                total.mul_(_f32(self._post_factor))
        else:
            total = torch.zeros_like(parts[0], dtype=torch.float32)
            for part in parts:
                total.add_(part.to(comm).float())
            # An all-reduce, or a reduction into other memory, is rounded before it is added to earlier sums.
            if flow.stage == 0:
                total.mul_(_f32(self._post_factor))
            if flow.stage == 0 or not flow.reduce_scatter or is_apart:
                total = total.to(comm)
        self.sums[p] = (total if before is None else before.to(torch.float32).add_(total)).to(flow.accum)

    def gradient(self, p: nn.Parameter) -> torch.Tensor:
        return self.sums[p].float() * self.gradient_factor

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Returns whether the update was applied. It is skipped where a gradient is not finite."""
        self.finish()
        squares = sum(float(g.double().square().sum()) for g in self.sums.values())
        self.norm = math.sqrt(squares) * self.gradient_factor if math.isfinite(squares) else math.inf
        self.is_skipped = not math.isfinite(squares)
        if not self.is_skipped:
            coefficient = min(1.0, self.flow.clip / (self.norm + 1e-6)) if self.flow.clip else 1.0
            grad_scale = self.gradient_factor * coefficient
            for group in self.groups:
                for p in group["params"]:
                    if p in self.used and p.requires_grad:
                        self._update(p, group, grad_scale)
        self.drop()
        return not self.is_skipped

    @torch.no_grad()
    def _update(self, p: nn.Parameter, group: Mapping[str, Any], grad_scale: float) -> None:
        """AdamW (arXiv 1711.05101). The operations come in the engine's order, and each is rounded to fp32."""
        flow = self.flow
        if p not in self.states:
            zeros = torch.zeros_like(p, dtype=flow.state)
            self.states[p] = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        state = self.states[p]
        state["step"] += 1
        lr, (beta1, beta2) = group["lr"], group["betas"]
        correction1, correction2 = 1.0 - beta1 ** state["step"], 1.0 - beta2 ** state["step"]
        root = math.sqrt(correction2)
        g = self.sums[p].float() * _f32(grad_scale)
        master = self.masters[p].float() * _f32(1.0 - lr * group["weight_decay"])
        m, v = state["exp_avg"].float(), state["exp_avg_sq"].float()
        m = m + (g - m) * _f32(1.0 - beta1)
        v = v * _f32(beta2) + (g * _f32(1.0 - beta2)) * g
        state["exp_avg"], state["exp_avg_sq"] = m.to(flow.state), v.to(flow.state)
        # Take roots in fp64: torch may use a library whose fp32 roots are not rounded correctly.
        master = master - (m * _f32(lr * root / correction1)) / (v.double().sqrt().float() + _f32(group["eps"] * root))
        self.masters[p] = master.to(flow.master)
        p.data.copy_(self.masters[p])

    # -- between steps ----------------------------------------------------------------------------------------------

    def set_master(self, p: nn.Parameter, value: torch.Tensor) -> None:
        self.masters[p] = value.to(self.flow.master, copy=True)
        p.data.copy_(self.masters[p])

    def set_trainable(self, patterns: Sequence[str], *, keep_state: bool = True) -> None:
        """Frozen parameters keep their masters and states if ``keep_state``; otherwise they start anew from the weight
        when they are trained again. Newly trained parameters join the first group."""
        in_groups = {p for group in self.groups for p in group["params"]}
        for p, name in self.names.items():
            p.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
            if not keep_state and not p.requires_grad:
                self.states.pop(p, None)
                self.masters.pop(p, None)
            if p.requires_grad and p not in in_groups:
                self.groups[0]["params"].append(p)
                p.register_post_accumulate_grad_hook(self._collect)
            if p.requires_grad and p not in self.masters:
                self.masters[p] = p.detach().to(self.flow.master, copy=True)

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "weights": {self.names[p]: self.masters.get(p, p.detach()) for p in self.names},
                "states": {self.names[p]: state for p, state in self.states.items()},
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.groups],
            }
        )

    def restore(self, saved: Mapping[str, Any], *, optimizer: bool) -> None:
        """``optimizer``: whether moments, step counts and options of the groups are restored too."""
        saved = copy.deepcopy(saved)
        for name, value in saved["weights"].items():
            p = self._params[name]
            if p in self.masters:
                self.set_master(p, value)
            else:
                p.data.copy_(value)
        if optimizer:
            self.states = {self._params[name]: state for name, state in saved["states"].items()}
            for group, options in zip(self.groups, saved["groups"]):
                group.update(options)

    def weights(self) -> dict[str, torch.Tensor]:
        """The masters of trained parameters and the weights of the others, in fp32."""
        return {name: self.masters.get(p, p.detach()).float().clone() for name, p in self.model.named_parameters()}
