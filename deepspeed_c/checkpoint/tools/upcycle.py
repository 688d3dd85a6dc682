"""Sparse upcycling (arXiv 2212.05055): the checkpoint of a dense model as that of a model with ``MoE`` layers, whose
experts are equal copies of the MLPs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from deepspeed_c.checkpoint.experts import EXPERT_LIST
from deepspeed_c.checkpoint.formats.ranges import fill
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Read, Source, Topology
from deepspeed_c.errors import CheckpointError

__all__ = ["ROUTER_STD", "UpcycledSource"]

# Standard deviation of new routers: large enough to break ties between experts, small enough that probabilities are
# nearly equal.
ROUTER_STD = 0.02
# Entries of ``Source.state`` that still hold. Schedules, loss scales and counters belong to the dense run.
KEPT_STATE = ("config", "versions")
NAMES_SHOWN = 5


class UpcycledSource(Source):
    """``source`` with every MLP that ``modules`` names replaced by ``n_experts`` equal experts and a router.

    Optimizer states are left out: the experts have none of their own yet. Closes ``source``.

    Args:
        source: the dense checkpoint.
        n_experts: experts of each layer.
        modules: paths of MLPs, as patterns whose ``*`` stands for a part of one name between dots: "layers.*.mlp".
        hidden_size: width of the MLPs' input. Shapes alone do not tell it from the width between their matrices.
        router_std: standard deviation of the routers' weights; 0 makes zeros.
        seed: seed of the routers' weights; the layer's name goes into it as well.

    Raises:
        CheckpointError: no module fits a pattern, an MLP has no matrix of that width, is tied to other weights, or is a
            mixture of experts already; or a number is out of range.
    """

    def __init__(
        self,
        source: Source,
        n_experts: int,
        modules: Sequence[str],
        *,
        hidden_size: int,
        router_std: float = ROUTER_STD,
        seed: int = 0,
    ) -> None:
        if n_experts < 1 or not 0 <= router_std < float("inf"):
            raise CheckpointError(
                f"{n_experts} experts with routers of standard deviation {router_std}",
                where="upcycle",
                fix="give at least one expert, and a finite deviation that is not negative",
            )
        self.where, self.format, self.identity = source.where, source.format, source.identity
        self.aliases, self.params, self.groups = dict(source.aliases), {}, []
        self.topology = Topology()
        self.state = {key: source.state[key] for key in KEPT_STATE if key in source.state}
        self.tensors = {}
        self._source, self._std, self._seed = source, router_std, seed
        self._from: dict[tuple[str, str], LogicalTensor] = {}
        self._routers: dict[tuple[str, str], torch.Tensor] = {}
        weights = {key: tensor for key, tensor in source.tensors.items() if key[0] in (PARAM, MASTER, BUFFER)}
        mlp_of = _find(list(dict.fromkeys(name for _, name in weights)), modules, source.where)
        tied = [name for pair in source.aliases.items() for name in pair if _owner(name, set(mlp_of.values()))]
        if tied:
            raise CheckpointError(
                "is tied to other weights, and experts are trained apart",
                where=f"{source.where}, {tied[0]}",
                fix="untie it, or leave its module out",
            )
        by_mlp: dict[str, list[LogicalTensor]] = {}
        for (_, name), tensor in weights.items():
            if name in mlp_of:
                by_mlp.setdefault(mlp_of[name], []).append(tensor)
        done: set[str] = set()
        for (_, name), tensor in weights.items():
            mlp = mlp_of.get(name)
            if mlp is None:
                self._list(tensor, name)
            elif mlp not in done:
                done.add(mlp)
                self._list_layer(mlp, by_mlp[mlp], n_experts, hidden_size)
        self.layers = sorted(done)
        """Paths of the MLPs that became mixtures."""

    def _list(self, tensor: LogicalTensor, name: str) -> None:
        listed = replace(tensor, name=name)
        self.tensors[listed.key] = listed
        self._from[listed.key] = tensor

    def _list_layer(self, mlp: str, tensors: Sequence[LogicalTensor], n_experts: int, width: int) -> None:
        matrices = [tensor for tensor in tensors if tensor.kind != BUFFER and len(tensor.shape) == 2]
        if not matrices or any(".deepspeed_moe." in f".{tensor.name}." for tensor in tensors):
            raise CheckpointError(
                "is no MLP: " + ("it is a mixture of experts already" if matrices else "it has no matrix"),
                where=f"{self.where}, {mlp}",
                fix="name the modules of MLPs",
            )
        if odd := [tensor for tensor in matrices if width not in tensor.shape]:
            raise CheckpointError(
                f"has shape {odd[0].shape}, and the width of the MLP's input is said to be {width}",
                where=f"{self.where}, {odd[0].name}",
                fix="give another width (--hidden-size)",
            )
        router = f"{mlp}.deepspeed_moe.gate.wg.weight"
        # The router gets what the first matrix has: a weight, a master, or both.
        for like in (tensor for tensor in matrices if tensor.name == matrices[0].name):
            listed = LogicalTensor(name=router, kind=like.kind, shape=(n_experts, width), dtype=like.dtype)
            self.tensors[listed.key] = listed
            self._routers[listed.key] = self._router(mlp, n_experts, width).to(like.dtype)
        for expert in range(n_experts):
            for tensor in tensors:
                rest = tensor.name[len(mlp) + 1 :]
                self._list(tensor, f"{mlp}.deepspeed_moe.{EXPERT_LIST}.{expert}.{rest}")

    def _router(self, mlp: str, n_experts: int, width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self._seed << 32) ^ zlib.crc32(mlp.encode()) & (1 << 63) - 1)
        return torch.randn(n_experts, width, generator=generator) * self._std

    def read(self, reads: Sequence[Read]) -> None:
        passed = []
        for read in reads:
            router = self._routers.get(read.tensor.key)
            if router is None:
                if read.tensor.key not in self._from:
                    raise CheckpointError(
                        f"has no {read.tensor.kind} of that name", where=f"{self.where}, {read.tensor.name}"
                    )
                passed.append(read._replace(tensor=self._from[read.tensor.key]))
                continue

            def fetch(first: int, into: torch.Tensor, router: torch.Tensor = router) -> None:
                into.copy_(router.view(-1)[first : first + into.numel()])

            fill(read, fetch, self.where)
        self._source.read(passed)

    def close(self) -> None:
        self._source.close()


def _find(names: Sequence[str], patterns: Sequence[str], where: str) -> dict[str, str]:
    """Name of a tensor -> path of the module that a pattern fits, for all tensors in such modules."""
    found: dict[str, str] = {}
    fits: set[str] = set()
    for name in names:
        parts = name.split(".")
        for pattern in patterns:
            wanted = pattern.split(".")
            is_below = len(parts) > len(wanted)
            if is_below and all(fnmatchcase(part, want) for part, want in zip(parts, wanted)):
                found[name] = ".".join(parts[: len(wanted)])
                fits.add(pattern)
                break
    if missing := [pattern for pattern in patterns if pattern not in fits] or (not patterns and ["(none)"]):
        last = {pattern.rpartition(".")[2] for pattern in missing}
        near = sorted({".".join(p[: p.index(part) + 1]) for n in names for part in last if part in (p := n.split("."))})
        known = near or sorted({name.rpartition(".")[0] for name in names})
        raise CheckpointError(
            f"no module is called {missing[0]!r}; there are {', '.join(known[:NAMES_SHOWN])}",
            where=where,
            fix="name modules with their full paths; a * stands for a part of one name between dots",
        )
    return found


def _owner(name: str, modules: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in modules for i in range(1, len(parts)))
