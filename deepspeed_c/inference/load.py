"""Fills a model from files, each rank with its own part, and writes a model's whole weights.

A plan is made first, from headers alone. It finds everything that does not fit, and all ranks agree on it. Only then
are parameters on the meta device made, one after the other, and the rank's part of each is read by ranges. If weights
will be sharded over data-parallel ranks too, they are read by the units that hold the shards (``shards_from_files``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from deepspeed_c.checkpoint.formats.model_folder import ModelFolderWriter
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, Box, LogicalTensor, Read, Source
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh
from deepspeed_c.engine.checkpoint.boxes import plan_reads
from deepspeed_c.engine.parts import Parts
from deepspeed_c.engine.weights import aliases_of, named_tensors, stream, stream_order
from deepspeed_c.errors import CheckpointError, DeepSpeedCError
from deepspeed_c.inject.cut import Cut
from deepspeed_c.logging import logger
from deepspeed_c.offload.place import raise_together
from deepspeed_c.weights.files import LIST_FILE, open_weights
from deepspeed_c.weights.meta import TensorHolders, check_buffers, compute_buffers, device_of
from deepspeed_c.weights.names import named_as_in_model
from deepspeed_c.zero.layout.cuts import cut_of
from deepspeed_c.zero.weights.fetch import Fetcher
from deepspeed_c.zero.weights.fp32_buffers import names_in_fp32
from deepspeed_c.zero.weights.unread import ReadRange, leave_unread

__all__ = ["load_checkpoint", "save_mp_checkpoint", "shards_from_files"]

NAMES_SHOWN = 5


class _Wanted(NamedTuple):
    """One tensor of the model and its source."""

    name: str
    tensor: torch.Tensor
    found: LogicalTensor
    cut: Cut | None
    """This rank's part of ``found``; None: all of it."""
    dtype: torch.dtype


class _LoadPlan:
    """The reads of a load, found without any change."""

    def __init__(
        self, model: torch.nn.Module, source: Source, are_parts: bool, dtype: torch.dtype | None, where: str
    ) -> None:
        """where: the checkpoint's name, for messages."""
        self.model, self.source, self.where = model, source, where
        self.wanted: list[_Wanted] = []
        self.unexpected: list[str] = []
        tensors = named_tensors(model, exclude_frozen=False)
        self.source = source = named_as_in_model(source, model, list(tensors))
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        kinds: dict[str, dict[str, LogicalTensor]] = {}
        for (kind, name), tensor in source.tensors.items():
            if kind in (PARAM, MASTER, BUFFER):
                kinds.setdefault(name, {})[kind] = tensor
        kept = set() if dtype is None else names_in_fp32(model, dtype)
        missing: list[str] = []
        problems: list[str] = []
        used: set[str] = set()
        for of_tensor in names.values():
            tensor = tensors[of_tensor[0]]
            known = [
                name
                for own in of_tensor
                for name in (own, source.aliases.get(own))
                if name is not None and name in kinds
            ]
            used.update(known)
            if not known:
                missing.append(of_tensor[0])
                continue
            stays_fp32 = not kept.isdisjoint(of_tensor)
            self._want(of_tensor[0], tensor, kinds[known[0]], are_parts, dtype, stays_fp32, problems)
        self.unexpected = [name for name in kinds if name not in used]
        if missing:
            more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
            problems.insert(
                0,
                f"{len(missing)} of the model's {len(names)} weights are missing: {', '.join(missing[:NAMES_SHOWN])}"
                f"{more}; it holds {', '.join(list(kinds)[:NAMES_SHOWN]) or 'no weights'}, ...",
            )
        if problems:
            more = f"; and {len(problems) - NAMES_SHOWN} more" if len(problems) > NAMES_SHOWN else ""
            raise CheckpointError(
                f"does not fit {type(model).__name__}: {'; '.join(problems[:NAMES_SHOWN])}{more}",
                where=source.where,
                fix="name the checkpoint of this model, or make the model from the checkpoint's own configuration",
            )
        check_buffers(model)
        # Files are read from front to back.
        order = {key: at for at, key in enumerate(source.tensors)}
        self.wanted.sort(key=lambda wanted: order[wanted.found.key])

    def _want(
        self,
        name: str,
        tensor: torch.Tensor,
        kinds: Mapping[str, LogicalTensor],
        are_parts: bool,
        dtype: torch.dtype | None,
        stays_fp32: bool,
        problems: list[str],
    ) -> None:
        is_float = tensor.is_floating_point()
        target = tensor.dtype
        if tensor.is_meta and is_float:
            if stays_fp32:
                target = torch.float32
            elif dtype is not None and (isinstance(tensor, torch.nn.Parameter) or tensor.dtype != torch.float32):
                target = dtype  # buffers of fp32 stay so, because their values are more precise than weights
        found = kinds.get(BUFFER) or kinds.get(PARAM)
        if found is None or (found.dtype != target and MASTER in kinds):
            found = kinds[MASTER]
        cut = cut_of(tensor)
        if cut is not None and are_parts and tuple(found.shape) == tuple(cut.local_shape):
            cut = None
        shape = tuple(tensor.shape if cut is None else cut.logical_shape)
        if tuple(found.shape) != shape:
            problems.append(f"{name} has shape {tuple(found.shape)}, the model's has {shape}")
        elif is_float and not (found.dtype.is_floating_point and found.dtype.itemsize >= min(2, target.itemsize)):
            problems.append(f"{name} is quantized ({found.dtype}), and its scales would be lost")
        else:
            self.wanted.append(_Wanted(name, tensor, found, cut, target))

    def run(self) -> None:
        """Make and fill everything. Raises CheckpointError if a file cannot be read; the tensors before are filled
        then."""
        self._run(None)

    def run_but_for_shards(self, comm: Collectives) -> _ShardReads:
        """As ``run``, but parameters on the meta device become ``UnreadShard`` over ``comm``: the units of the model
        read them. Returns these reads."""
        reads = _ShardReads(self.source, comm)
        self._run(reads.unread)
        reads.begin()
        return reads

    def _run(self, unread: list[tuple[torch.nn.Parameter, _Wanted]] | None) -> None:
        """``unread``: takes the parameters that are made without elements and not read; None: all are read."""
        device = device_of(self.model)
        compute_buffers(self.model, device)  # first, because it may fail, and then no memory has been taken
        holders = TensorHolders(self.model)
        with torch.no_grad():
            for wanted in self.wanted:
                _, tensor, found, cut, dtype = wanted
                if not tensor.is_meta:
                    _read_into(self.source, found, cut, tensor.detach())
                elif unread is not None and isinstance(tensor, torch.nn.Parameter):
                    unread.append((holders.replace(tensor, torch.empty(0, dtype=dtype, device=device)), wanted))
                else:
                    values = torch.empty(tensor.shape, dtype=dtype, device=device)
                    _read_into(self.source, found, cut, values)
                    holders.replace(tensor, values)
        holders.finish()


class _ShardReads:
    """The reads of parameters that units make.

    ``problem``: the first error. Nothing is read afterwards, and nothing is raised before all ranks can raise together:
    the other ranks wait for this rank while units are made.
    """

    def __init__(self, source: Source, comm: Collectives) -> None:
        self._source, self._comm = source, comm
        self.unread: list[tuple[torch.nn.Parameter, _Wanted]] = []
        self.problem: DeepSpeedCError | None = None

    def begin(self) -> None:
        """Make the parameters ``UnreadShard``. Called again after a failure, because nobody holds their values."""
        for param, wanted in self.unread:
            read = self._read_of(wanted.found, wanted.cut)
            leave_unread(param, wanted.name, self._comm, wanted.tensor.shape, read)

    def _read_of(self, found: LogicalTensor, cut: Cut | None) -> ReadRange:
        """The function that reads ranges of this rank's part of ``found``."""

        def read(begin: int, into: torch.Tensor) -> None:
            if self.problem is not None:
                return
            reads, after = plan_reads(found, cut, begin, into)
            try:
                self._source.read(reads)
            except DeepSpeedCError as error:
                self.problem = error
                return
            for put in after:
                put()

        return read


def _read_into(source: Source, found: LogicalTensor, cut: Cut | None, target: torch.Tensor) -> None:
    """Fill ``target`` with this rank's part of ``found``, through at most a copy of one box."""
    if cut is None:
        places = [(target, None)]
    else:
        places = [(target[box.of_local()], Box(box.logical_offset, box.size)) for box in cut.boxes]
    for place, box in places:
        if place.is_contiguous():
            source.read([Read(found, 0, place.view(-1), box)])
        else:
            held = torch.empty(place.shape, dtype=place.dtype, device=place.device)
            source.read([Read(found, 0, held.view(-1), box)])
            place.copy_(held)


def load_checkpoint(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    base_dir: str = "",
    mesh: Mesh,
    dtype: torch.dtype | None,
) -> None:
    """Fill ``model``, which has been cut over the tensor-parallel ranks of ``mesh``, from files. Collective.

    checkpoint: a folder or file of weights (safetensors, torch), a checkpoint of an engine, or DeepSpeed's list of
    files, as a mapping or a JSON file. base_dir: folder of relative paths. dtype: dtype of weights that are on the meta
    device; None: their own. Such weights are made on the model's device. Weights that have memory keep dtype and place.

    Tied weights stay tied, and need one name in the files. Tensors of the files that the model does not have are named
    in a warning. Memory: the rank's part of the model, and one tensor.

    Raises CheckpointError, on all ranks and before anything is changed, if there is no such checkpoint, if it is
    damaged, or if weights are missing or have other shapes; ModelError if a buffer on the meta device cannot be made.
    """
    problem: DeepSpeedCError | None = None
    with _planned(model, checkpoint, base_dir, mesh, dtype) as plan:
        try:
            plan.run()
        except DeepSpeedCError as error:
            problem = error
        raise_together(problem, CheckpointError, plan.where, mesh.comm)


@contextmanager
def shards_from_files(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    base_dir: str = "",
    mesh: Mesh,
    dtype: torch.dtype | None,
) -> Iterator[None]:
    """Context within which the caller lays ``model`` out in units that shard its weights. Collective.

    The arguments have the meanings of ``load_checkpoint``. Each rank reads the ranges of its own shard when the units
    are made, or moved into their home: no rank holds a whole weight, unless the weight stays whole on each rank.
    Tensors that have memory and buffers are filled at once.

    Raises as ``load_checkpoint``. A file that cannot be read is an error at the end of the context, on all ranks. After
    an error in the context or at its end, parameters have no values, and say so.
    """
    reads: _ShardReads | None = None
    problem: DeepSpeedCError | None = None
    with _planned(model, checkpoint, base_dir, mesh, dtype) as plan:
        try:
            reads = plan.run_but_for_shards(mesh.tokens)
        except DeepSpeedCError as error:
            problem = error
        raise_together(problem, CheckpointError, plan.where, mesh.comm)
        try:
            yield
            raise_together(reads.problem, CheckpointError, plan.where, mesh.comm)
        except BaseException:
            reads.begin()
            raise


@contextmanager
def _planned(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    base_dir: str,
    mesh: Mesh,
    dtype: torch.dtype | None,
) -> Iterator[_LoadPlan]:
    """Context with the plan of a load, on which all ranks agree, and its open files."""
    where = "checkpoint" if isinstance(checkpoint, Mapping) else os.fspath(checkpoint)
    source: Source | None = None
    plan: _LoadPlan | None = None
    problem: DeepSpeedCError | None = None
    try:
        try:
            weights = open_weights(
                checkpoint, base_dir=base_dir, rank=mesh.tensors.rank, n_ranks=mesh.tensors.world_size
            )
            source = weights.source
            plan = _LoadPlan(model, source, weights.are_parts, dtype, where)
        except DeepSpeedCError as error:
            problem = error
        raise_together(problem, CheckpointError, where, mesh.comm)
        if plan.unexpected and mesh.comm.rank == 0:
            more = ", ..." if len(plan.unexpected) > NAMES_SHOWN else ""
            logger.warning(
                f"{plan.source.where}: tensors that {type(model).__name__} does not have are not loaded"
                f" ({len(plan.unexpected)}): {', '.join(plan.unexpected[:NAMES_SHOWN])}{more}"
            )
        yield plan
    finally:
        if plan is not None:
            plan.source.close()
        elif source is not None:
            source.close()


def save_mp_checkpoint(
    model: torch.nn.Module, folder: str | os.PathLike[str], *, mesh: Mesh, fetcher: Fetcher | None = None
) -> None:
    """Write the weights of ``model``, which is cut over the tensor-parallel ranks of ``mesh``, to ``folder``.
    ``fetcher`` gathers the weights of a sharded model. Collective.

    The folder has whole weights in Hugging Face's layout, the model's configuration, and DeepSpeed's list of files
    (``ds_inference_config.json``). Any number of ranks loads it again. Memory: one whole tensor, or one gather unit.

    Raises CheckpointError on all ranks if it cannot be written; an older model there is intact then.
    """
    folder = os.fspath(folder)
    tensors = named_tensors(model, exclude_frozen=False)
    parts = Parts(model, tensors, mesh)
    aliases = aliases_of(tensors, parts)
    whole_names, sharded_names = stream_order(tensors)
    order = [*whole_names, *(name for names in sharded_names.values() for name in names)]
    entries = [(name, parts.shape(own, tensors[own]), tensors[own].dtype) for own in order for name in parts.names(own)]
    problem: DeepSpeedCError | None = None
    writer: ModelFolderWriter | None = None
    if mesh.comm.rank == 0:
        try:
            writer = ModelFolderWriter(folder, entries, aliases)
            writer.__enter__()
        except CheckpointError as error:
            problem, writer = error, None
    # A rank that cannot write still takes part in every gather, because the other ranks wait for it.
    for name, whole in stream(tensors, fetcher, parts):
        if writer is not None and problem is None:
            try:
                writer.write(name, whole)
            except (OSError, CheckpointError) as error:
                problem = _as_checkpoint_error(error, folder)
    if writer is not None:
        if problem is None:
            try:
                _write_beside(model, writer, mesh.tensors.world_size)
            except OSError as error:
                problem = _as_checkpoint_error(error, folder)
        try:
            writer.__exit__(type(problem) if problem else None, problem, None)
        except (OSError, CheckpointError) as error:
            problem = problem or _as_checkpoint_error(error, folder)
    raise_together(problem, CheckpointError, folder, mesh.comm)


def _write_beside(model: torch.nn.Module, writer: ModelFolderWriter, n_ranks: int) -> None:
    """Write the model's configurations and DeepSpeed's list of files into the folder that is being made."""
    for name in ("config", "generation_config"):
        save = getattr(getattr(model, name, None), "save_pretrained", None)
        if callable(save):
            save(writer.staging)
    floats = [t.dtype for t in model.parameters() if t.is_floating_point()]
    content = {
        "type": "ds_model",
        "checkpoints": writer.files,
        "version": 1.0,
        "parallelization": "pp",  # each tensor is whole
        "tp_size": n_ranks,
        "dtype": str(max(set(floats), key=floats.count)).removeprefix("torch.") if floats else "float32",
    }
    with open(os.path.join(writer.staging, LIST_FILE), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _as_checkpoint_error(error: Exception, folder: str) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(
        f"the weights could not be written: {error}", where=folder, fix="name a folder with room that you may write to"
    )
