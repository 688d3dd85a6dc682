"""The trial of a cut before a weight is changed: a small copy of the model, whole and on all ranks in one process.

[Note: trial] A rule names layers; what a model computes between them is its own code, which may hold parameters of
single heads, counts that nobody changed, or a weight that every rank sees a part of the tokens' columns with. So the
model's code runs: once whole, and once on each rank (a thread) with sums that are taken between the threads. Linear
layers keep their sizes and their names and have products of two thin matrices as weights, one layer of each kind
stays of a list, and tables of words are short, so that a trial takes little memory whatever the model's size. Values
and the gradients of all parameters are compared. Every rank of a job tries all ranks and comes to the same answer.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from deepspeed_c.errors import DeepSpeedCError, ModelError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.inject.layers import RowPicker, is_transposed, product_of
from deepspeed_c.inject.own_heads import SharedKey, count_own_heads
from deepspeed_c.inject.plan import Attention, Planned, RankPlace

__all__ = ["CutPlan", "TrialFindings", "try_cut"]

_WHERE = "tensor_parallel"
_FIX = (
    'leave the block whole with "partition_type": "skip" in tensor_parallel.partition_config, or add a policy that'
    " cuts it (docs/adding/inject-policy.md)"
)
_THIN = 7  # columns of the two factors of a weight
_TABLE_ROWS = 61
_BIG = 2**20  # elements above which a parameter that is no linear layer's has one row, repeated
_TOKENS = (2, 7)
# A sum of a few thousand fp32 products of order 1, several layers deep, is right to about 1e-5 of its largest value.
_CLOSE, _NOTHING = 2e-3, 3e-6
# Whatever a model's own code raises where shapes do not fit it or inputs are not those that it expects.
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


_FAILED = "nothing: it has failed"


class CutPlan(Protocol):
    """What a rank is to do, by the model's own modules and parameters."""

    planned: list[Planned]
    cuts: dict[torch.nn.Parameter, tuple[Cut, int]]
    pickers: dict[torch.nn.Parameter, RowPicker]
    shared: set[torch.nn.Parameter]
    attentions: dict[str, Attention]


@dataclass
class TrialFindings:
    """Outcome of a trial in which nothing was wrong."""

    sums: set[str] = field(default_factory=set)
    """Parameters that no rule names, whose gradients are right once they are summed over ranks."""
    ran: set[str] = field(default_factory=set)
    """Modules with a rule that took part."""
    obstacle: str = ""
    """Why there was no trial; empty where there was one."""


def try_cut(
    model: torch.nn.Module,
    n_ranks: int,
    plan: Callable[[torch.nn.Module, RankPlace], CutPlan],
    planned: Sequence[Planned],
) -> TrialFindings:
    """Compare ``model``, cut over ``n_ranks``, with the whole one. plan: what is done to a copy of it on one rank.

    planned: the modules of ``model`` that have a rule. Raises ModelError for the first module or parameter that
    disagrees. Nothing of ``model`` is changed.
    """
    if not callable(getattr(model, "get_input_embeddings", None)) or getattr(model, "config", None) is None:
        return TrialFindings(obstacle=f"{type(model).__name__} is no model of transformers, whose inputs are known")
    obstacle = ""
    with _OwnRandomness():
        for shortens in (True, False):
            try:
                skeleton = _Skeleton(model, [step.name for step in planned], shortens=shortens)
                plans = [plan(skeleton.model, RankPlace(rank, n_ranks)) for rank in range(n_ranks)]
                whole = _SmallModel(skeleton.model, plans[0])
                inputs = whole.find_inputs()
            except (DeepSpeedCError, *_RAISED) as error:
                obstacle = f"{type(model).__name__} does not run on stand-ins: {type(error).__name__}: {_line(error)}"
                continue
            return _compare(whole, inputs, plans, skeleton, [name for name, _ in model.named_parameters()])
    return TrialFindings(obstacle=obstacle)


def _compare(
    whole: _SmallModel, inputs: dict[str, Any], plans: Sequence[CutPlan], skeleton: _Skeleton, names: Sequence[str]
) -> TrialFindings:
    for step in plans[0].planned:
        if step.rule.style == "row":
            whole.model.get_submodule(step.name).mark_row()
    together = _TrialRanks(len(plans))
    runs: list[_TrialRun] = []
    for rank, found in enumerate(plans):
        copied = whole.on_rank(found, _TrialRank(together, rank))
        runs.append(_TrialRun(copied, [step.name for step in found.planned]))
    # Only now: copies of a model have its hooks.
    expected = _TrialRun(whole.model, [step.name for step in plans[0].planned])
    expected(inputs)
    together.run([lambda run=run: run(inputs) for run in runs])
    for number, error in enumerate(together.errors):
        if error is not None:
            raise ModelError(
                f"rank {number} of {len(runs)} cannot compute with its part: {type(error).__name__}: {_line(error)}",
                where=skeleton.real_name(runs[number].where) or _WHERE,
                fix=_FIX,
            ) from error
    _compare_values(expected, runs, skeleton)
    sums = _compare_gradients(expected, runs, {step.name: step for step in plans[0].planned}, skeleton)
    wanted = {name for name in names if skeleton.small_name(name) in sums}
    return TrialFindings(wanted, {name for name in skeleton.names if skeleton.small_name(name) in expected.rows})


def _compare_values(expected: _TrialRun, runs: Sequence[_TrialRun], skeleton: _Skeleton) -> None:
    pairs = [(name, value, [run.rows.get(name) for run in runs]) for name, value in expected.rows.items()]
    pairs += [
        (f"output {number}", value, [run.outputs[number] for run in runs])
        for number, value in enumerate(expected.outputs)
    ]
    for where, value, others in pairs:
        if value is None:
            continue
        for rank, other in enumerate(others):
            far = _distance(other, value)
            if far > _CLOSE * max(value.abs().max().item(), 1e-12):
                wrong = [name for name in _wrong_gradients(expected, runs) if _is_beside(name, where)]
                inside = [skeleton.real_name(name) for name in wrong]
                raise ModelError(
                    f"rank {rank} of {len(runs)} computes another value than the whole layer: off by {far:.3g}, the"
                    f" largest is {value.abs().max().item():.3g}. Parameters whose gradients are wrong as well:"
                    f" {', '.join(inside[:4]) or 'none beside it'}",
                    where=skeleton.real_name(where),
                    fix=_FIX,
                )


def _wrong_gradients(expected: _TrialRun, runs: Sequence[_TrialRun]) -> Iterator[str]:
    """Parameters whose gradients on the ranks do not add up to the whole one."""
    for name, grad in expected.grads.items():
        of_ranks = [run.grads.get(name, torch.zeros_like(grad)) for run in runs]
        limit = _CLOSE * grad.abs().max().item()
        is_same = all(_distance(other, grad) <= limit for other in of_ranks)
        if not is_same and _distance(torch.stack(of_ranks).sum(0), grad) > limit:
            yield name


def _is_beside(name: str, where: str) -> bool:
    """Whether a parameter belongs to no module with thin weights, and to the same block as the row layer ``where``."""
    last = name.rpartition(".")[2]
    return name.startswith(f"{where.rpartition('.')[0]}.") and last not in ("first", "second")


def _compare_gradients(
    expected: _TrialRun, runs: Sequence[_TrialRun], steps: Mapping[str, Planned], skeleton: _Skeleton
) -> set[str]:
    """Parameters that must be summed and that no rule says so of."""
    largest = max((grad.abs().max().item() for grad in expected.grads.values()), default=0.0)
    verdicts: dict[str, dict[str, str]] = {}
    for name, grad in expected.grads.items():
        limit = _CLOSE * grad.abs().max().item() + _NOTHING * largest
        of_ranks = [run.grads.get(name, torch.zeros_like(grad)) for run in runs]
        is_same = all(_distance(other, grad) <= limit for other in of_ranks)
        is_sum = _distance(torch.stack(of_ranks).sum(0), grad) <= limit
        module, _, last = name.rpartition(".")
        step = steps.get(module)
        if step is not None and step.rule.style in ("column", "row", "slice", "heads", "shared"):
            is_row_bias = step.rule.style == "row" and last == "bias"
            is_mine = step.rule.style != "heads" or last in step.rule.params
            if is_mine and not (is_same if is_row_bias else is_sum):
                _refuse_gradient(skeleton.real_name(name), grad, of_ranks)
            if is_mine:
                continue
        if not is_same and not is_sum:
            _refuse_gradient(skeleton.real_name(name), grad, of_ranks)
        real = f"{module}.weight" if last in ("first", "second") else name
        verdicts.setdefault(real, {})[name] = "either" if is_same and is_sum else "same" if is_same else "sum"
    sums = set()
    for real, found in verdicts.items():
        kinds = set(found.values()) - {"either"}
        if len(kinds) > 1:
            name = next(iter(found))
            _refuse_gradient(skeleton.real_name(real), expected.grads[name], [run.grads.get(name) for run in runs])
        if kinds == {"sum"}:
            sums.add(real)
    return sums


def _refuse_gradient(name: str, grad: torch.Tensor, of_ranks: Sequence[torch.Tensor | None]) -> None:
    norms = ", ".join("none" if other is None else f"{other.norm().item():.4g}" for other in of_ranks)
    raise ModelError(
        f"its gradient is neither the same on all ranks nor their sum: of norm {grad.norm().item():.4g} in the whole"
        f" layer, {norms} on the ranks",
        where=name,
        fix=_FIX,
    )


def _distance(a: torch.Tensor | None, b: torch.Tensor) -> float:
    if a is None or a.shape != b.shape:
        return float("inf")
    far = (a - b).abs().max().item() if a.numel() else 0.0
    return float("inf") if math.isnan(far) else far


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class _OwnRandomness:
    """Random numbers of the trial, which leave the caller's as they were."""

    def __enter__(self) -> None:
        self._state = torch.get_rng_state()
        torch.manual_seed(20)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)


class _Skeleton:
    """A copy of a model on the meta device, with one layer of each kind in lists of layers."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str], *, shortens: bool) -> None:
        self.names = names
        self._moved: list[tuple[str, str]] = []  # (a layer's prefix, the prefix of its kind's in the copy)
        memo: dict[int, Any] = {}
        for param in model.parameters():
            memo[id(param)] = torch.nn.Parameter(
                torch.empty(param.shape, dtype=torch.float32, device="meta"), requires_grad=param.is_floating_point()
            )
        for buffer in model.buffers():
            memo[id(buffer)] = buffer.detach()
        memo |= _handles(model)
        if shortens:
            for name, layers in _layer_lists(model, names):
                kept: dict[Any, int] = {}
                chosen: list[torch.nn.Module] = []
                for number, layer in layers.named_children():
                    kind = _kind(layer)
                    if kind not in kept:
                        kept[kind] = len(chosen)
                        chosen.append(layer)
                    self._moved.append((f"{name}.{number}.", f"{name}.{kept[kind]}."))
                memo[id(layers)] = torch.nn.ModuleList(copy.deepcopy(layer, memo) for layer in chosen)
        self.model = copy.deepcopy(model, memo).eval()

    def small_name(self, name: str) -> str:
        """The name in the copy of a module or parameter of the same kind."""
        for prefix, other in self._moved:
            if name.startswith(prefix):
                return other + name[len(prefix) :]
        return name

    def real_name(self, name: str) -> str:
        """The model's first name for ``name`` of the copy."""
        for prefix, other in self._moved:
            if name.startswith(other):
                return prefix + name[len(other) :]
        return name


def _handles(model: torch.nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` by which copies share handles of hooks: the copy of a handle's copy is none."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, RemovableHandle):
                    found[id(item)] = item
    return found


def _shared_parts(model: torch.nn.Module) -> dict[int, Any]:
    """The same memo, by which copies share buffers as well."""
    return {id(buffer): buffer for buffer in model.buffers()} | _handles(model)


def _layer_lists(model: torch.nn.Module, names: Sequence[str]) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """The outermost lists that hold modules with a rule."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(f"{other}.") for other in outer):
            continue
        if len(module) > 1 and any(step.startswith(f"{name}.") for step in names):
            outer.append(name)
            yield name, module


def _kind(layer: torch.nn.Module) -> tuple:
    """Equal for layers that compute alike: classes, shapes, and settings but for their number."""
    found = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str))
            and not key.startswith("_")
            and "idx" not in key
            and "layer_id" not in key
        )
        shapes = tuple((key, tuple(param.shape)) for key, param in module.named_parameters(recurse=False))
        found.append((name, type(module), settings, shapes))
    return tuple(found)


class _SmallModel:
    """A small copy of the model that runs in one process."""

    def __init__(self, skeleton: torch.nn.Module, plan: CutPlan) -> None:
        self.weights = torch.Generator().manual_seed(5)
        self.model = copy.deepcopy(skeleton, _shared_parts(skeleton))
        by_name = {step.name: step for step in plan.planned}
        stands: dict[int, torch.nn.Module] = {}
        for name, module in list(self.model.named_modules()):
            stand = self._stand_in(module, by_name.get(name))
            if stand is not None:
                stands[id(module)] = stand
        for module in list(self.model.modules()):
            for key, child in list(module._modules.items()):
                if id(child) in stands:
                    module._modules[key] = stands[id(child)]
        self._fill()
        if getattr(self.model.config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
            self.model.set_attn_implementation("eager")  # others may need a device

    def _stand_in(self, module: torch.nn.Module, step: Planned | None) -> torch.nn.Module | None:
        if step is not None and step.rule.style == "experts":
            return _TrialExperts(module)
        own = dict(module.named_parameters(recurse=False))
        if product_of(module) is not None and "weight" in own:
            return _ThinLinear(module, self.weights)
        if type(module) is torch.nn.Embedding and module.num_embeddings > _TABLE_ROWS and (step is None):
            return _ShortTable(module)
        return None

    def _fill(self) -> None:
        """Give every parameter and buffer values."""
        for module in self.model.modules():
            for name, param in module.named_parameters(recurse=False):
                if not param.is_meta:
                    continue
                if param.numel() > _BIG:
                    values = self._random(torch.Size((1, *param.shape[1:]))).expand(param.shape)
                else:
                    values = self._random(param.shape)
                fresh = torch.nn.Parameter(values, requires_grad=param.requires_grad and param.numel() <= _BIG)
                module.register_parameter(name, fresh)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = self._buffer(buffer)

    def _random(self, shape: torch.Size) -> torch.Tensor:
        values = torch.randn(shape, generator=self.weights)
        # Scales and biases of norms are near 1; rows of matrices have about the length 1.
        return 0.8 + 0.3 * values if len(shape) < 2 else values / max(shape[-1], 1) ** 0.5

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        if not buffer.is_meta:
            values = buffer.detach().cpu()
            return values.float() if values.is_floating_point() else values
        if buffer.is_floating_point():
            return torch.rand(buffer.shape, generator=self.weights)
        return (
            torch.ones(buffer.shape, dtype=buffer.dtype)
            if buffer.dtype == torch.bool
            else torch.zeros(buffer.shape, dtype=buffer.dtype)
        )

    def find_inputs(self) -> dict[str, Any]:
        """The first of several inputs that the model runs with. Raises what it raises for the last."""
        takes = inspect.signature(self.model.forward).parameters
        config = self.model.config
        inputs: list[dict[str, Any]] = []
        ids = torch.randint(3, _vocabulary(config), _TOKENS, generator=self.weights)
        text: dict[str, Any] = {"input_ids": ids} if "input_ids" in takes else {}
        if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
            text["decoder_input_ids"] = ids.flip(1)
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
        image: dict[str, Any] = {}
        if "pixel_values" in takes and isinstance(size, int):
            image["pixel_values"] = torch.randn(_TOKENS[0], channels, size, size, generator=self.weights)
        inputs += [found for found in (text, {**text, **image}, image) if found]
        if not inputs:
            raise ValueError("its forward takes neither input_ids nor pixel_values")
        failure: Exception | None = None
        for found in inputs:
            found = {**found, **({"use_cache": False} if "use_cache" in takes else {})}
            try:
                with torch.no_grad():
                    values = list(_tensors(self.model(**found)))
                if not values or not all(value.isfinite().all() for value in values):
                    raise ValueError("its outputs are no finite numbers")
                return found
            except _RAISED as error:
                failure = error
        raise failure or ValueError("it has no inputs")

    def on_rank(self, plan: CutPlan, rank: _TrialRank) -> torch.nn.Module:
        """A copy that computes with the rank's part."""
        made = copy.deepcopy(self.model, _shared_parts(self.model))
        for step in plan.planned:
            style, module = step.rule.style, made.get_submodule(step.name)
            if style in ("column", "row"):
                weight = step.module.weight
                dim = 0 if (style == "column") != is_transposed(step.module) else 1
                module.cut(rank, step, _indices(plan, weight, dim), _sizes(plan, weight, dim))
            elif style == "slice":
                _cut_in_place(module, "weight", _indices(plan, step.module.weight, 1), 1)
            elif style == "heads":
                for name in step.rule.params:
                    if name in dict(step.module.named_parameters(recurse=False)):
                        _cut_in_place(module, name, _indices(plan, step.module.get_parameter(name), 0), 0)
            elif style == "latent":
                rope = step.attention.owner.qk_rope_head_dim if step.attention is not None else 0
                module.register_forward_hook(SharedKey(rank, rope, step.name))
        for name in {step.attention.name for step in plan.planned if step.attention is not None}:
            attention = plan.attentions[name]
            module = made.get_submodule(name)
            owner = module.get_submodule(attention.heads.owner) if attention.heads.owner else module
            count_own_heads(module, replace(attention, owner=owner))
        return made


def _vocabulary(config: Any) -> int:
    """Words that are safe to ask for."""
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    n_words = getattr(text, "vocab_size", None)
    return min(n_words, 40) if isinstance(n_words, int) and n_words > 4 else 40


def _indices(plan: CutPlan, param: torch.nn.Parameter, dim: int) -> torch.Tensor | None:
    """Of the whole parameter's elements along ``dim``, the ones that the rank computes with; None: all."""
    if param in plan.pickers:
        return torch.cat([torch.arange(begin, begin + size) for begin, size in plan.pickers[param].runs])
    if param not in plan.cuts:
        return None
    boxes = plan.cuts[param][0].boxes
    return torch.cat([torch.arange(box.logical_offset[dim], box.logical_offset[dim] + box.size[dim]) for box in boxes])


def _sizes(plan: CutPlan, param: torch.nn.Parameter, dim: int) -> tuple[int, int] | None:
    if param not in plan.cuts:
        return None
    box = plan.cuts[param][0].boxes[0]
    return box.logical_offset[dim], box.size[dim]


def _cut_in_place(module: torch.nn.Module, name: str, index: torch.Tensor | None, dim: int) -> None:
    """``module`` reads elements ``index`` of its parameter, whose gradient is the whole one's, zero elsewhere."""
    if index is None:
        return
    param = module._parameters.pop(name)
    module.register_parameter(f"{name}_whole", param)

    def pick(module: torch.nn.Module, args: Any) -> None:
        module.__dict__[name] = param.index_select(dim, index)

    module.register_forward_pre_hook(pick)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


class _TrialRun:
    """One forward and backward, with everything that is compared."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.rows: dict[str, torch.Tensor | None] = {}
        self.outputs: list[torch.Tensor] = []
        self.grads: dict[str, torch.Tensor] = {}
        self._running: list[str] = []
        wanted = set(names)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            note = name in wanted
            module.register_forward_hook(
                lambda module, args, output, name=name, note=note: self._leave(name, module, output, note=note)
            )

    @property
    def where(self) -> str:
        """The innermost module that was running when an error ended the run; empty in backward."""
        return self._running[-1] if self._running else ""

    def _enter(self, name: str) -> None:
        self._running.append(name)

    def _leave(self, name: str, module: torch.nn.Module, output: Any, *, note: bool) -> None:
        self._running.pop()
        if not note:
            return
        is_row = isinstance(output, torch.Tensor) and getattr(module, "is_row", False)
        self.rows[name] = output.detach().clone() if is_row else None

    def __call__(self, inputs: dict[str, Any]) -> None:
        outputs = list(_tensors(self.model(**inputs)))
        self.outputs = [value.detach() for value in outputs]
        signs = torch.Generator().manual_seed(11)
        loss = sum(
            (value * torch.randn(value.shape, generator=signs)).sum() for value in outputs if value.requires_grad
        )
        if isinstance(loss, torch.Tensor):
            loss.backward()
        for name, param in self.model.named_parameters():
            if param.requires_grad and param.grad is not None:
                self.grads[name.removesuffix("_whole")] = param.grad


class _TrialStopped(Exception):
    """Another rank has failed."""


class _TrialRanks:
    """Ranks as threads: each gives a value, and gets all ranks'."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self.errors: list[BaseException | None] = [None] * n_ranks
        self._values: list[tuple[str, Any]] = [("", None)] * n_ranks
        self._barrier = threading.Barrier(n_ranks)

    def exchange(self, rank: int, label: str, value: Any) -> list[Any]:
        self._values[rank] = (label, value)
        self._barrier.wait()
        labels, values = zip(*self._values, strict=True)
        self._barrier.wait()
        if _FAILED in labels:
            raise _TrialStopped
        if len(set(labels)) > 1:
            raise RuntimeError(f"ranks send different things: {', '.join(sorted(set(labels)))}")
        return list(values)

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """All of them at once; ``errors`` says what became of each."""

        def one(rank: int) -> None:
            try:
                bodies[rank]()
                self.exchange(rank, "the end", None)
            except _TrialStopped:
                pass
            except _RAISED as error:
                self.errors[rank] = error
                # All others come here too, by their next exchange: which ranks fail does not hang on who is first.
                with contextlib.suppress(_TrialStopped):
                    self.exchange(rank, _FAILED, None)
            except BaseException:
                self._barrier.abort()  # nobody waits for a thread that is gone
                raise

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.n_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _TrialRank:
    """One rank of a trial: what ``TensorRanks`` is to a model that is cut."""

    def __init__(self, together: _TrialRanks, rank: int) -> None:
        self._together, self.rank = together, rank

    def __deepcopy__(self, memo: dict) -> _TrialRank:
        return self

    def exchange(self, label: str, value: torch.Tensor) -> list[torch.Tensor]:
        return self._together.exchange(self.rank, label, value)

    def enter(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return _TrialEnter.apply(x, self, label) if x.requires_grad else x

    def leave(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return _TrialLeave.apply(x, self, label)

    def gather(self, x: torch.Tensor, label: str) -> torch.Tensor:
        return _TrialGather.apply(x, self, label)


class _TrialEnter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: _TrialRank, label: str) -> torch.Tensor:
        ctx.rank, ctx.label = rank, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return sum(ctx.rank.exchange(f"input gradient of {ctx.label}", grad)), None, None


class _TrialLeave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: _TrialRank, label: str) -> torch.Tensor:
        return sum(rank.exchange(f"output of {label}", x.detach()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _TrialGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: _TrialRank, label: str) -> torch.Tensor:
        parts = rank.exchange(f"columns of {label}", x.detach())
        ctx.begin, ctx.size = sum(part.shape[-1] for part in parts[: rank.rank]), x.shape[-1]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(-1, ctx.begin, ctx.size), None, None


class _ThinLinear(torch.nn.Module):
    """A linear layer whose weight is a product of two thin matrices, whole or one rank's part of it."""

    def __init__(self, module: torch.nn.Module, weights: torch.Generator) -> None:
        super().__init__()
        shape = tuple(module.weight.shape)
        self.out_features, self.in_features = reversed(shape) if is_transposed(module) else shape
        self._is_transposed = is_transposed(module)
        self.first = torch.nn.Parameter(
            torch.randn(self.in_features, _THIN, generator=weights) / max(self.in_features, 1) ** 0.5
        )
        self.second = torch.nn.Parameter(torch.randn(_THIN, self.out_features, generator=weights) / _THIN**0.5)
        bias = getattr(module, "bias", None)
        self.bias = None if bias is None else torch.nn.Parameter(0.3 * torch.randn(bias.shape, generator=weights))
        self.is_row = False
        self._rank: _TrialRank | None = None
        self._style, self._label, self._gathers = "", "", False
        self._index: torch.Tensor | None = None
        self._run: tuple[int, int] | None = None

    @property
    def weight(self) -> torch.Tensor:
        first, second = self._factors()
        whole = first @ second
        return whole if self._is_transposed else whole.t()

    def mark_row(self) -> None:
        self.is_row = True

    def cut(self, rank: _TrialRank, step: Planned, index: torch.Tensor | None, run: tuple[int, int] | None) -> None:
        self._rank, self._style, self._label, self._gathers = rank, step.rule.style, step.name, step.rule.gathers
        self._index, self._run = index, run
        self.is_row = step.rule.style == "row"

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._index is None:
            return self.first, self.second
        if self._style == "column":
            return self.first, self.second.index_select(1, self._index)
        return self.first.index_select(0, self._index), self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank, bias = self._rank, self.bias
        first, second = self._factors()
        if rank is None:
            y = x @ first @ second
            return y if bias is None else y + bias
        if self._style == "column":
            y = rank.enter(x, self._label) @ first @ second
            if bias is not None:
                y = y + (bias if self._index is None else bias.index_select(0, self._index))
            return rank.gather(y, self._label) if self._gathers else y
        if self._gathers and self._run is not None:
            x = rank.enter(x, self._label).narrow(-1, *self._run)
        y = rank.leave(x @ first @ second, self._label)
        return y if bias is None else y + bias


class _TrialExperts(torch.nn.Module):
    """In the place of experts, whose cut is by their own layout and not by the model's code: the same on all ranks."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        for name, value in vars(experts).items():
            if isinstance(value, (bool, int, float, str)) and name not in vars(self):
                self.__dict__[name] = value

    def forward(self, hidden: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        output = 0.7 * hidden
        for value in (*others, *more.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output = output * (1 + value.mean())
        return output


class _ShortTable(torch.nn.Module):
    """A table of words with few rows, which words share."""

    def __init__(self, module: torch.nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = module.num_embeddings, module.embedding_dim, None
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = torch.nn.Parameter(torch.empty(_TABLE_ROWS, module.embedding_dim, device="meta"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids % _TABLE_ROWS, self.weight)
