"""Muon (Jordan 2024): momentum, orthogonalised by a Newton-Schulz iteration, for matrices; AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed_c.errors import OptimizerError
from deepspeed_c.ops.optim import NESTEROV, Call, FusedOptimizer
from deepspeed_c.ops.scope import Scope, Shards

__all__ = ["Muon", "newton_schulz"]

# Coefficients of the quintic a x + b x^3 + c x^5 with the largest slope at 0 for which singular values stay near 1
# (Jordan 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(matrix: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``matrix`` [..., rows, columns] with its singular values driven to about 1 (0.5 to 1.5), in ``steps``
    rounds of matrix products.

    The products are in ``dtype``, by default bfloat16 on CUDA and float32 on the host. The result is float32.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrix.is_cuda else torch.float32
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = (matrix.mT if is_tall else matrix).to(dtype)
    # The Frobenius norm bounds the spectral norm, which must be at most 1 to converge.
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(dtype) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).float()


class Muon(FusedOptimizer):
    """Muon for the matrices of groups with ``use_muon``, AdamW for all other parameters.

    A group has an entry ``use_muon``, True or False. A group without this entry is split into its parameters of two or
    more dimensions and its other parameters. Parameters of fewer than two dimensions in a ``use_muon`` group go to
    AdamW too. Parameters that are moved to AdamW in these two ways take ``adam_lr`` (``lr`` if None). Parameters of
    more than two dimensions count as matrices of shape [first, all others].

    ``lr`` is the Muon group's: updates are scaled by max(1, rows / columns) ** 0.5. ``momentum``, ``nesterov`` and
    ``ns_steps`` are Muon's; ``betas`` and ``eps`` AdamW's; ``weight_decay`` is decoupled in both. State: ``step`` and
    ``momentum_buffer``, or ``exp_avg`` and ``exp_avg_sq``.
    """

    kind = "adamw"
    q8_refusal: ClassVar[str] = "Muon orthogonalises the momentum of whole matrices, which is not done on codes"
    scope = "matrix"
    config_types = ("muon",)
    option_names: ClassVar[tuple[str, ...]] = ("state_dtype", "ns_dtype")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        nesterov: bool = True,
        ns_steps: int = 5,
        adam_lr: float | None = None,
        ns_dtype: torch.dtype | None = None,
        *,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 1:
            raise self._error(f"ns_steps is {ns_steps!r}", fix="pass a number of Newton-Schulz rounds >= 1; 5 is usual")
        self.ns_dtype = ns_dtype
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "use_muon": True,
        }
        super().__init__(_split_groups(params, lr if adam_lr is None else adam_lr), defaults, state_dtype=state_dtype)

    @classmethod
    def from_config(
        cls, kind: str, groups: list[dict[str, Any]], params: dict[str, Any], names: Mapping[int, str]
    ) -> Muon:
        """As DeepSpeed: matrices are parameters of at least two dimensions whose name holds neither "embed" nor
        "lm_head"; an attribute ``use_muon`` on a parameter overrides this rule. Matrices take ``muon_lr``, other
        parameters ``adam_lr``; the default of both is ``lr``."""

        def wants_muon(p: Tensor) -> bool:
            name = names.get(id(p), "").lower()
            return getattr(p, "use_muon", p.dim() >= 2 and "embed" not in name and "lm_head" not in name)

        lr = params.get("lr")
        lrs = {True: params.pop("muon_lr", lr), False: params.pop("adam_lr", lr)}
        split: list[dict[str, Any]] = []
        for group in groups:
            for use_muon, chosen in lrs.items():
                members = [p for p in group["params"] if wants_muon(p) == use_muon]
                if members:
                    default = {} if chosen is None else {"lr": chosen}
                    split.append({**default, **group, "params": members, "use_muon": use_muon})
        return cls(split, **params)

    def scope_of_group(self, group: int) -> Scope:
        return "matrix" if self.param_groups[group]["use_muon"] else "element"

    def update_bucket(self, shards: Shards) -> None:
        """Each rank computes momentum on its shard. The results are gathered into whole matrices, and each rank
        orthogonalises only the matrices that its shard touches.
        """
        group, whole = shards.group, shards.matrices
        if whole is None:
            super().update_bucket(shards)
            return
        self.momentum_tensors(group, shards.params, shards.grads, whole.mine, shards.grad_scale)
        n_steps = self.param_groups[group]["ns_steps"]
        updates = [whole.cut(i, self.orthogonalize(m, n_steps)) for i, m in enumerate(whole.gather())]
        self.apply_tensors(group, shards.params, updates, shards.copies)

    def update_bytes(self, matrices: Sequence[int], *, on_host: bool) -> int:
        """The bytes of the results so far, and of the six matrices of an iteration. Each of the six is as large as the
        matrix if the matrix is square, and smaller otherwise. They are in bf16 on a device.
        """
        largest = max(matrices, default=0)
        return 4 * (sum(matrices) - largest) + 6 * (4 if on_host else 2) * largest

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        members = param_group["params"]
        members = [members] if torch.is_tensor(members) else list(members)
        if param_group.get("use_muon", True) and any((p[1] if isinstance(p, tuple) else p).dim() < 2 for p in members):
            raise OptimizerError(
                "a group with use_muon holds a parameter of fewer than two dimensions",
                where="Muon.add_param_group",
                fix="put it in a group of its own with use_muon=False",
            )
        super().add_param_group({**param_group, "params": members})

    def orthogonalize(self, update: Tensor, ns_steps: int | None = None) -> Tensor:
        """Returns the amount to subtract, times lr, for a momentum ``update`` [rows, ...] of a whole matrix: float32,
        in the same shape.
        """
        matrix = update.flatten(1)
        if matrix.numel() == 0:
            return torch.zeros_like(update, dtype=torch.float32)
        steps = self.defaults["ns_steps"] if ns_steps is None else ns_steps
        scale = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
        return (newton_schulz(matrix, steps, self.ns_dtype) * scale).reshape(update.shape)

    @torch.no_grad()
    def momentum_tensors(
        self,
        group: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        updates: Sequence[Tensor],
        grad_scale: float = 1.0,
    ) -> None:
        """First half, elementwise: advances the momentum of ``params`` by ``grads`` times ``grad_scale`` and writes the
        tensors to be orthogonalised to ``updates``.
        """
        if params:
            self._opened(params)
            self._momentum(group, params, grads, updates, grad_scale)

    @torch.no_grad()
    def apply_tensors(
        self, group: int, params: Sequence[Tensor], updates: Sequence[Tensor], copies: Sequence[Tensor | None] = ()
    ) -> None:
        """Second half, elementwise: decays ``params``, subtracts lr times the orthogonalised ``updates``, writes
        ``copies``.
        """
        if params:
            self._opened(params)
            self._apply_updates(group, params, updates, copies)
            self._close(params)

    def _momentum(
        self,
        index: int,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        updates: Sequence[Tensor],
        grad_scale: float,
    ) -> None:
        group = self.param_groups[index]
        (buffers,) = self._states(index, params)
        flags = NESTEROV if group["nesterov"] else 0
        for indices in _runs(params, grads, buffers, updates):
            torch.ops.deepspeed_c.muon_momentum_(
                [grads[i] for i in indices],
                [buffers[i] for i in indices],
                [updates[i] for i in indices],
                float(group["momentum"]),
                grad_scale,
                flags,
            )

    def _apply_updates(
        self, index: int, params: Sequence[Tensor], updates: Sequence[Tensor], copies: Sequence[Tensor | None]
    ) -> None:
        group = self.param_groups[index]
        for indices in _runs(params, updates, copies if len(copies) > 0 else [None] * len(params)):
            chosen = [copies[i] for i in indices] if len(copies) > 0 else []
            torch.ops.deepspeed_c.muon_apply_(
                [params[i] for i in indices],
                [updates[i] for i in indices],
                [] if not chosen or chosen[0] is None else chosen,
                float(group["lr"]),
                float(group["weight_decay"]),
            )
        torch.autograd.graph.increment_version([*params, *(copy for copy in copies if copy is not None)])

    def names_of_states(self, group: int) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.param_groups[group]["use_muon"] else ("exp_avg", "exp_avg_sq")

    def _flags(self, group: dict[str, Any]) -> int:
        return super()._flags({**group, "nesterov": False})

    def _update(self, index: int, call: Call, steps: list[int], grad_scale: float) -> None:
        group = self.param_groups[index]
        if not group["use_muon"]:
            super()._update(index, call, steps, grad_scale)
            return
        params, grads, copies = call.params, call.grads, call.copies
        fitting = [self._fitting_gradient(index, i, p, g) for i, (p, g) in enumerate(zip(params, grads))]
        updates = [torch.empty_like(p, dtype=torch.float32, memory_format=torch.preserve_format) for p in params]
        self._momentum(index, params, fitting, updates, grad_scale)
        updates = [self.orthogonalize(update, group["ns_steps"]) for update in updates]
        updates = [self._fitting_gradient(index, i, p, u) for i, (p, u) in enumerate(zip(params, updates))]
        self._apply_updates(index, params, updates, copies)


def _split_groups(params: Any, adam_lr: float) -> list[dict[str, Any]]:
    """Splits groups so that each group has ``use_muon`` and holds only parameters that ``use_muon`` is valid for."""
    given = list(params)
    if given and not isinstance(given[0], Mapping):
        given = [{"params": given}]
    groups: list[dict[str, Any]] = []
    for group in given:
        members = group["params"]
        members = [members] if torch.is_tensor(members) else list(members)
        tensors = [p[1] if isinstance(p, tuple) else p for p in members]
        wants_muon = group.get("use_muon", True)
        matrices = [p for p, t in zip(members, tensors) if wants_muon and t.dim() >= 2]
        rest = [p for p, t in zip(members, tensors) if not (wants_muon and t.dim() >= 2)]
        if matrices or (wants_muon and not rest):
            groups.append({**group, "params": matrices, "use_muon": True})
        if rest or not wants_muon:
            lr = {} if not wants_muon and "lr" in group else {"lr": adam_lr}
            groups.append({**group, **lr, "params": rest, "use_muon": False})
    return groups


def _runs(*lists: Sequence[Tensor | None]) -> list[list[int]]:
    """Groups of indices whose tensors share devices and dtypes: one operator call for each group."""
    by_key: dict[tuple[Any, ...], list[int]] = {}
    for i, members in enumerate(zip(*lists)):
        key = tuple(None if t is None else (t.device, t.dtype) for t in members)
        by_key.setdefault(key, []).append(i)
    return list(by_key.values())
