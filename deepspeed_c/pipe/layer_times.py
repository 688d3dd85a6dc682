"""Measures how long each layer's forward and backward take, before ranks know which layers they hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm.axes import PP
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.errors import CommError, DeepSpeedCError, ModelError, RankMismatchError
from deepspeed_c.pipe.link import Link, LocalLink, RemoteLink
from deepspeed_c.pipe.writable import needs_gradient
from deepspeed_c.recompute.conditions import Conditions
from deepspeed_c.weights.meta import TensorHolders

__all__ = ["lent", "measure_layers"]

N_WARMUP, N_TIMED = 1, 5


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def measure_layers(
    names: Sequence[str],
    trial: Callable[[int], AbstractContextManager[Callable[[Any], Any]]],
    example: Any,
    mesh: Mesh,
) -> list[int]:
    """Nanoseconds of a forward and a backward of each layer; the same numbers on all ranks. Collective.

    Layers run one after the other, on the real outputs of the layers before: layer i is on pipeline rank i modulo their
    number, with one layer at a time in memory. It is the median of ``N_TIMED`` runs, and of parallel pipelines. Random
    generators of torch and Python stay as they are. names: of the layers, for errors. trial: returns a context in which
    the layer of a number can run on the accelerator. example: input of layer 0.

    Raises ModelError on all ranks, with the layer's name, if a layer raises an exception.
    """
    ranks, mine = mesh.ranks(PP), mesh.index(PP)
    came, goes = _links(mesh, ranks, mine)
    found: dict[int, int] = {}
    cause: Exception | None = None
    with Conditions(with_python=True).replayed(), torch.enable_grad():
        value = tree_map(lambda leaf: leaf.to(_device()) if torch.is_tensor(leaf) else leaf, example)
        value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        problem = ""
        for index in range(mine, len(names), len(ranks)):
            label = f"output of layer {index - 1}"
            if index > 0:
                came.post(label)
                problem, value = came.take()
            if not problem:
                try:
                    with trial(index) as layer:
                        found[index], value = _time(layer, value)
                except (CommError, RankMismatchError):
                    raise
                except Exception as error:  # noqa: BLE001  layers raise anything, and all ranks have to learn of it
                    problem, cause = _words(names[index], error), error
            if index + 1 < len(names):
                label = f"output of layer {index}"
                try:
                    goes.send((problem, None if problem else value), label)
                except ModelError as error:  # nothing has been sent
                    problem, cause = _words(names[index], error), error
                    goes.send((problem, None), label)
            value = None
        goes.flush()
    all_found = mesh.comm.gather_objects((problem, found), label="times of layers")
    problem = next((problem for problem, _ in all_found if problem), "")
    if problem:
        raise ModelError(
            problem,
            where='PipelineModule(partition_method="profile")',
            fix="correct the layer, or pass an example_input that the first layer takes",
        ) from cause
    return [
        max(1, statistics.median_low([times[index] for _, times in all_found if index in times]))
        for index in range(len(names))
    ]


def _links(mesh: Mesh, ranks: Sequence[int], mine: int) -> tuple[Link, Link]:
    """The links from the pipeline rank before this one, and to the one after it, in a circle."""
    if len(ranks) == 1:
        link = LocalLink()
        return link, link
    before, after = ranks[mine - 1], ranks[(mine + 1) % len(ranks)]
    device, me = _device(), mesh.comm.rank
    # The tag is the receiver, because two ranks have a link in each direction.
    came = RemoteLink(mesh.comm, before, me, me, device)
    return came, RemoteLink(mesh.comm, me, after, after, device)


def _words(name: str, error: Exception) -> str:
    text = error.what if isinstance(error, DeepSpeedCError) else str(error)
    return f"{name} raised {type(error).__name__}: {text}"


def _time(layer: Callable[[Any], Any], value: Any) -> tuple[int, Any]:
    """(median nanoseconds, outputs)."""
    found = []
    for _ in range(N_WARMUP + N_TIMED):
        leaves, spec = tree_flatten(value)
        # A layer may write to its input, so each run gets a copy, which is no leaf of the graph.
        given = tree_unflatten([leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in leaves], spec)
        get_accelerator().synchronize()
        begin = time.perf_counter_ns()
        outputs = layer(given)
        roots = [leaf for leaf in tree_flatten(outputs)[0] if needs_gradient(leaf)]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        get_accelerator().synchronize()
        found.append(time.perf_counter_ns() - begin)
    leaves, spec = tree_flatten(outputs)
    own = [leaf.detach().requires_grad_(leaf.requires_grad) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return statistics.median_low(found[N_WARMUP:]), tree_unflatten(own, spec)


@contextmanager
def lent(module: torch.nn.Module, fill: Callable[[], None] | None = None) -> Iterator[None]:
    """Within this context ``module`` is in training, and has other tensors in place of its own, on the accelerator:
    copies, or what ``fill`` puts there. So its own parameters get no gradients, and its own buffers do not change.
    """
    modules = list(module.modules())
    modes = [(each, each.training) for each in modules]
    kept = [(tensors, dict(tensors)) for each in modules for tensors in (each._parameters, each._buffers)]
    holders = TensorHolders(module)
    try:
        if fill is None:
            for tensor in [*module.parameters(), *module.buffers()]:
                holders.replace(tensor, tensor.detach().to(_device(), copy=True))
            holders.finish()
        else:
            fill()
        module.train()
        yield
    finally:
        for tensors, own in kept:
            tensors.update(own)
        for each, is_training in modes:
            each.train(is_training)
        holders.finish()
