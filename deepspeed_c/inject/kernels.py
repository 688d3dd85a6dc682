"""Operators of ``deepspeed_c.ops.nn`` in place of a model's own: norms, activations, gated MLPs, rotary positions.

``inject_kernels`` gives modules another forward, and changes nothing else: modules, parameters, names and hooks stay.
``revert_kernels`` restores the forwards. The name and class of a module prove nothing about its computation. So its own
forward is run on stand-ins for its weights, with large values and small, in each dtype, and must give the operator's
result.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inject.swap import swap_forward
from deepspeed_c.ops import nn

__all__ = ["KernelReport", "inject_as_asked", "inject_kernels", "kernels_as_asked", "revert_kernels"]

_ACTS: tuple[nn.Act, ...] = ("gelu", "gelu_tanh", "silu", "relu")
_GATED = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACT_NAMES = ("act_fn", "activation_fn", "act")
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_ROTARY = "apply_rotary_pos_emb"
# Largest difference between a module's own forward and a kernel, relative to the largest result. In float32 the order
# of sums differs; in 16 bits the module may round several times where the kernel rounds once.
_TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
# Scales of the stand-ins' values. The smaller scale shows differences in the epsilon.
_SCALES = (1.0, 0.01)
Forward = Callable[..., Any]
KernelMatch = tuple[str, Forward] | str | None
"""(the operator, a forward that runs it); or the reason why a module keeps its own forward; or None if no kernel is for
this kind of module.
"""


@dataclass
class KernelReport:
    """The outcome for each module that looks like one of the kinds with a kernel."""

    swapped: dict[str, str] = field(default_factory=dict)
    """Dotted name of a module -> the operator that it runs now."""
    remainder: dict[str, str] = field(default_factory=dict)
    """Dotted name of a module of a kind with a kernel -> the reason why the module keeps its own forward."""

    @property
    def summary(self) -> str:
        """The totals in one line."""
        return f"{len(self.swapped)} modules run them, {len(self.remainder)} keep their own forward"

    def __str__(self) -> str:
        width = max((len(name) for name in (*self.swapped, *self.remainder)), default=0)
        lines = [f"{name:<{width}}  {what}" for name, what in self.swapped.items()]
        lines += [f"{name:<{width}}  stays: {why}" for name, why in self.remainder.items()]
        return "\n".join([*lines, f"{len(self.swapped)} modules run kernels, {len(self.remainder)} keep their own"])


def inject_kernels(model: torch.nn.Module, *, strict: bool = False) -> KernelReport:
    """Swap kernels into ``model``, in place; its results stay the same to rounding.

    strict: a module that looks like a kind with a kernel but computes something else is an error. Raises ModelError for
    such a module, and where the model has nothing to swap. Raises StateError where the model has kernels already.
    Nothing is changed in these cases. Autocast decides dtypes operator by operator, so modules run their own forward
    under it.
    """
    if any(_is_swapped(module) for module in model.modules()):
        raise StateError("kernels are in it already", where=type(model).__name__, fix="call revert_kernels first")
    other = next(
        (name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype not in _TOLERANCES), ""
    )
    if other:
        raise ModelError(
            f"kernels compute in float32, bfloat16 and float16, not in {model.get_parameter(other).dtype}",
            where=other,
            fix="set replace_with_kernel_inject to false",
        )
    report = KernelReport()
    found: list[tuple[torch.nn.Module, Forward]] = []
    angles = {
        layout
        for module in model.modules()
        if type(module).__name__.endswith("RotaryEmbedding")
        for layout in [_layout_of_angles(module)]
    }
    kinds = (_find_norm, _find_act, _find_gated, lambda module: _find_rotary(module, angles))
    for name, module in model.named_modules():
        for find in kinds:
            answer = find(module)
            if answer is None:
                continue
            if isinstance(answer, str):
                report.remainder[name] = answer
            elif "forward" in vars(module):
                report.remainder[name] = "somebody has given it another forward already"
            else:
                report.swapped[name] = answer[0]
                found.append((module, answer[1]))
            break
    if not found or (strict and report.remainder):
        listed = "; ".join(f"{name}: {why}" for name, why in list(report.remainder.items())[:4])
        raise ModelError(
            f"{len(report.remainder)} modules keep their own forward ({listed})" if found else "nothing has a kernel",
            where=type(model).__name__,
            fix="set strict_mode to false" if found else "set replace_with_kernel_inject to false",
        )
    for module, forward in found:
        swap_forward(module, types.MethodType(forward, module))
    return report


def revert_kernels(model: torch.nn.Module) -> int:
    """Give every module its own forward back. Returns the number of modules that had another forward."""
    swapped = [module for module in model.modules() if _is_swapped(module)]
    for module in swapped:
        del module.forward
    return len(swapped)


def inject_as_asked(model: torch.nn.Module, section: TensorParallel) -> KernelReport:
    """``inject_kernels`` with the strictness of the section ``tensor_parallel``."""
    partition = section.partition_config
    return inject_kernels(model, strict=partition is not None and partition.strict_mode)


@contextlib.contextmanager
def kernels_as_asked(model: torch.nn.Module, section: TensorParallel) -> Iterator[KernelReport | None]:
    """Kernels in ``model`` if the section ``tensor_parallel`` asks for them. If the body raises, they are removed
    again.
    """
    if not section.replace_with_kernel_inject:
        yield None
        return
    report = inject_as_asked(model, section)
    try:
        yield report
    except BaseException:
        revert_kernels(model)
        raise


def _is_swapped(module: torch.nn.Module) -> bool:
    forward = getattr(vars(module).get("forward"), "__func__", None)
    if forward is None:
        return False
    # An attention with our rotation counts as swapped, although its forward is a copy of its own.
    return __name__ in (forward.__module__, getattr(forward.__globals__.get(_ROTARY), "__module__", ""))


def _where_it_decides_no_dtypes(kernel: Forward) -> Forward:
    def forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = module._parameters.get("weight")
        is_mixed = weight is not None and weight.dtype != x.dtype  # the module decides the promotion
        if is_mixed or torch.is_autocast_enabled(x.device.type):
            return type(module).forward(module, x)
        return kernel(module, x)

    return forward


def _stand_in(
    module: torch.nn.Module,
    dtype: torch.dtype,
    params: dict[str, torch.Tensor | None],
    children: dict[str, torch.nn.Module],
) -> torch.nn.Module:
    """A module with other parameters and children that shares everything else with ``module``."""
    made = copy.copy(module)
    own = {name: None if each is None else torch.nn.Parameter(each.to(dtype)) for name, each in params.items()}
    cast = {name: copy.deepcopy(child).to(dtype) for name, child in children.items()}
    vars(made).update(_parameters=own, _modules={**module._modules, **cast}, training=False)
    vars(made).pop("forward", None)
    return made


@torch.no_grad()
def _computes(
    module: torch.nn.Module,
    kernel: Forward,
    x: torch.Tensor,
    params: dict[str, torch.Tensor | None] | None = None,
    children: dict[str, torch.nn.Module] | None = None,
) -> bool:
    """Whether ``kernel`` and ``module``'s own forward give the same result, with ``params`` and ``children`` in place
    of the module's.
    """
    for dtype, tolerance in _TOLERANCES.items():
        tried = _stand_in(module, dtype, params or {}, children or {})
        for scale in _SCALES:
            given = (scale * x).to(dtype)
            try:
                own = type(module).forward(tried, given.clone())
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
                return False  # the forward takes other arguments
            if not isinstance(own, torch.Tensor) or not _is_alike(own, kernel(tried, given), tolerance):
                return False
    return True


def _is_alike(own: torch.Tensor, kernel: torch.Tensor, tolerance: float) -> bool:
    if own.shape != kernel.shape or own.dtype != kernel.dtype:
        return False
    own, kernel = own.float(), kernel.float()
    return bool((own - kernel).abs().max() <= tolerance * own.abs().max())


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _find_norm(module: torch.nn.Module) -> KernelMatch:
    own = type(module).forward
    if own in (torch.nn.LayerNorm.forward, torch.nn.RMSNorm.forward):
        if len(module.normalized_shape) != 1:
            return f"norms {len(module.normalized_shape)} dimensions together"
        n = module.normalized_shape[0]
        if n == 0:
            return "norms rows without an element"
        name, kernel = ("rms_norm", _rms_norm) if own is torch.nn.RMSNorm.forward else ("layer_norm", _layer_norm)
        params = {
            key: None if param is None else _numbers(i + 1, n)[i]
            for i, (key, param) in enumerate(module._parameters.items())
        }
        if _computes(module, kernel, 1 + 2 * _numbers(3, n).flip(0), params):
            return name, _where_it_decides_no_dtypes(kernel)
        return "computes another norm"
    if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
        return None
    eps = next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), "")
    params = dict(module.named_parameters())
    if not eps or list(params) != ["weight"] or params["weight"].dim() != 1:
        return "is no norm of one dimension with a weight and an epsilon"
    weight, x = _numbers(8), 1 + 2 * _numbers(3, 8).flip(0)
    kernels: tuple[tuple[str, Forward], ...] = (
        ("rms_norm", lambda m, x: nn.rms_norm(x, m.weight, getattr(m, eps))),
        ("rms_norm of 1 + weight", lambda m, x: nn.rms_norm(x, 1.0 + m.weight.float(), getattr(m, eps))),
        ("layer_norm", lambda m, x: nn.layer_norm(x, m.weight, None, getattr(m, eps))),
    )
    for name, kernel in kernels:
        if _computes(module, kernel, x, {"weight": weight}):
            return name, _where_it_decides_no_dtypes(kernel)
    return "computes another norm"


def _layer_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.layer_norm(x, module.weight, module.bias, module.eps)


def _rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    # torch's default is the epsilon of the dtype in which it sums. That dtype is float32 for 16-bit inputs, too.
    return nn.rms_norm(x, module.weight, torch.finfo(torch.float32).eps if module.eps is None else module.eps)


def _find_act(module: torch.nn.Module) -> KernelMatch:
    kind = type(module)
    is_leaf = not (module._modules or module._parameters or module._buffers)
    if not is_leaf or kind.__module__ not in ("torch.nn.modules.activation", "transformers.activations"):
        return None
    x = torch.linspace(-6.0, 6.0, 97)
    for act in _ACTS:

        def forward(m: torch.nn.Module, x: torch.Tensor, act: nn.Act = act) -> torch.Tensor:
            return nn.bias_act(x, None, act)

        if _computes(module, forward, x):
            return act, _where_it_decides_no_dtypes(forward)
    looks_alike = any(word in kind.__name__.lower() for word in ("gelu", "silu", "relu"))
    return "computes another activation" if looks_alike else None


def _find_gated(module: torch.nn.Module) -> KernelMatch:
    children = module._modules
    names = next((names for names in _GATED if all(name in children for name in names)), None)
    act = next((name for name in _ACT_NAMES if name in children), None)
    if names is None or act is None or "down_proj" not in children:
        return None
    if module._parameters or set(children) != {*names, act, "down_proj"}:
        return "has more than gate, up, activation and down"
    layers = {name: torch.nn.Linear(6, 8 if len(names) == 2 else 16, bias=False) for name in (*names,)}
    layers["down_proj"] = torch.nn.Linear(8, 5, bias=False)
    with torch.no_grad():
        for number, layer in enumerate(layers.values()):
            layer.weight.copy_(_numbers(number + 1, *layer.weight.shape)[number])
    x = _numbers(3, 6)
    kernels = (("swiglu", nn.swiglu), ("geglu", nn.geglu), ("geglu with tanh", _geglu_tanh))
    for label, gated in kernels:

        def forward(m: torch.nn.Module, x: torch.Tensor, gated: Forward = gated) -> torch.Tensor:
            return m.down_proj(gated(*(m._modules[name](x) for name in names)))

        if _computes(module, forward, x, children=layers):
            return label, _where_it_decides_no_dtypes(forward)
    return "computes another gated network"


def _geglu_tanh(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    return nn.geglu(gate, up, approximate="tanh")


def _layout_of_angles(module: torch.nn.Module) -> str:
    """Return how a rotary embedding lays out the angles of pairs: "halves", "interleaved", or "" for another layout."""
    positions = torch.arange(5).unsqueeze(0)
    try:
        cos, sin = copy.deepcopy(module)(torch.zeros(1, 5, 8), positions)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, NotImplementedError):
        return ""
    if cos.is_meta or cos.shape[-1] % 2 or cos.shape != sin.shape:
        return ""
    n_pairs = cos.shape[-1] // 2
    if all(torch.equal(x[..., :n_pairs], x[..., n_pairs:]) for x in (cos, sin)):
        return "halves"
    return "interleaved" if all(torch.equal(x[..., ::2], x[..., 1::2]) for x in (cos, sin)) else ""


def _find_rotary(module: torch.nn.Module, angles: set[str]) -> KernelMatch:
    own = type(module).forward
    code, names = getattr(own, "__code__", None), getattr(own, "__globals__", {})
    if code is None or _ROTARY not in code.co_names or _ROTARY not in names:
        return None
    apply = names[_ROTARY]
    if len(angles) != 1 or "" in angles:
        return "its rotary angles lie in no known order"
    (layout,) = angles
    rotate = _rotation(apply, layout == "interleaved")
    half = _numbers(1, 3, 4)
    angle = torch.cat([half, half], -1) if layout == "halves" else half.repeat_interleave(2, dim=-1)
    query, key = _numbers(1, 2, 3, 8), _numbers(2, 1, 3, 8)[1:]
    for dtype, tolerance in _TOLERANCES.items():
        given = [each.to(dtype) for each in (query, key, angle.cos(), angle.sin())]
        try:
            wanted = apply(*given)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return "turns positions by arguments of its own"
        if not all(_is_alike(a, b, tolerance) for a, b in zip(wanted, rotate(*given), strict=True)):
            return "turns other pairs"
    # A copy of the forward in which one name means our rotation; other models with the same class keep the original.
    forward = types.FunctionType(
        code, _names_with(rotate, apply, names, layout), own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return "rotary", forward


def _names_with(rotate: Forward, apply: Forward, names: dict[str, Any], layout: str) -> dict[str, Any]:
    """The global names of a forward, with ``rotate`` in place of the model's rotation ``apply``.

    They are the dictionary of a module that can be imported: a compiler looks a function's names up in the module that
    its ``__name__`` says, and would find the model's rotation there."""
    module = types.ModuleType(f"{__name__}.{names['__name__']}.{layout}_{id(apply):x}")
    if module.__name__ not in sys.modules:
        vars(module).update({**names, "__name__": module.__name__, _ROTARY: rotate})
        sys.modules[module.__name__] = module
    return vars(sys.modules[module.__name__])


def _rotation(apply: Forward, is_interleaved: bool) -> Forward:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_autocast_enabled(q.device.type) or unsqueeze_dim not in (1, 2):
            return apply(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        pairs = slice(None, None, 2) if is_interleaved else slice(cos.shape[-1] // 2)
        cos, sin = cos[..., pairs].float(), sin[..., pairs].float()

        def turn(x: torch.Tensor) -> torch.Tensor:
            if unsqueeze_dim == 2:
                return nn.rotary(x, cos, sin, is_interleaved=is_interleaved)
            return nn.rotary(x.transpose(1, 2), cos, sin, is_interleaved=is_interleaved).transpose(1, 2)

        return turn(q), turn(k)

    return rotate
