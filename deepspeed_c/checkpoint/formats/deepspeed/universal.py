"""Reads DeepSpeed's universal format: a folder for each parameter below ``zero/``, with one file for each of its
states.

The converter of DeepSpeed makes it from a checkpoint of its engine. Beside ``zero/`` lie the engine's model files, for
names, frozen weights and buffers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from deepspeed_c.checkpoint.formats.deepspeed.model_file import ModelStates, find_files, laid_out
from deepspeed_c.checkpoint.formats.deepspeed.pieces import PieceSource, StoredPiece, is_count, scaler_state
from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.torch_file import StoredTensor, materialize
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, ParamInfo, Topology
from deepspeed_c.errors import CheckpointError

__all__ = [
    "MASTER_FILE",
    "OPTIMIZER_FILE",
    "STATES_FOLDER",
    "UniversalSource",
    "check_folder",
    "check_state",
    "is_universal",
]

STATES_FOLDER = "zero"
OPTIMIZER_FILE = "optimizer_state.pt"
# The state that is the master weight.
MASTER_FILE = "fp32"
# The number of its steps.
STEP_FILE = "step"


def is_universal(folder: str) -> bool:
    """Whether ``folder`` is a tag's folder in the universal format."""
    return os.path.isfile(os.path.join(folder, STATES_FOLDER, OPTIMIZER_FILE))


def check_folder(param: str, where: str) -> None:
    """Raises CheckpointError unless a parameter of this name, which a stranger may have chosen, has a folder of its own
    below ``zero/``.
    """
    parts = param.split("/")
    if {"", ".", ".."} & set(parts) or parts[0] == OPTIMIZER_FILE or not _is_path_text(param):
        raise CheckpointError(
            f"a parameter {param!r} cannot have a folder in DeepSpeed's universal format",
            where=where,
            fix="use another format, or rename the parameter",
        )


def check_state(state: str, where: str) -> None:
    """Raises CheckpointError unless a state of this name has a file of its own in the parameter's folder."""
    if state in ("", MASTER_FILE, STEP_FILE) or "/" in state or not _is_path_text(state):
        raise CheckpointError(
            f"an optimizer state {state!r} cannot have a file in DeepSpeed's universal format",
            where=where,
            fix="use another format",
        )


def _is_path_text(name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


class UniversalSource(PieceSource):
    """A checkpoint in DeepSpeed's universal format.

    ``folder`` is a tag's folder. Raises CheckpointError for files that are missing, damaged or not read.
    """

    format = "deepspeed-universal"

    def __init__(self, folder: str) -> None:
        super().__init__(os.fspath(folder))
        with laid_out(self.where):
            self._open()

    def _open(self) -> None:
        if not is_universal(self.where):
            raise CheckpointError(
                f"holds no {STATES_FOLDER}/{OPTIMIZER_FILE}, so it is not in DeepSpeed's universal format",
                where=self.where,
            )
        files = find_files(self.where)
        if files is None or 0 not in files.models:
            raise CheckpointError("the model file of rank 0 is missing", where=self.where)
        model = ModelStates(files.models[0])
        if model.num_experts:
            raise CheckpointError(
                "has a mixture of experts, whose parameters have no folders of their own in this format",
                where=self.where,
                fix="load the checkpoint of DeepSpeed's engine that it was made from",
            )
        self.state = model.state()
        optimizer_path = os.path.join(self.where, STATES_FOLDER, OPTIMIZER_FILE)
        optimizer = read_file(optimizer_path).content
        if not isinstance(optimizer, Mapping):
            raise CheckpointError("is not a dictionary, as DeepSpeed writes it", where=optimizer_path)
        groups, group_of, step = self._groups(optimizer, model)
        self.aliases = (
            {name: first for name, first in (model.content.get("shared_params") or {}).items() if name in model.module}
            if files.is_stage3
            else model.ties()
        )
        self._add_model(
            model, files.models, {name for shapes in model.param_shapes for name in shapes}, files.is_stage3
        )
        for i, shapes in enumerate(model.param_shapes):
            for name, shape in shapes.items():
                group = group_of[i] if i < len(group_of) else None
                counts = self._add_states(model, name, shape, is_param_known=not files.is_stage3)
                if "step" not in counts and group is not None:
                    counts.update({} if (found := groups[group].get("step", step)) is None else {"step": found})
                self.params[name] = ParamInfo(group=group, counts=materialize(counts))
        self.groups = [
            materialize({key: value for key, value in group.items() if key not in ("params", "param_names")})
            for group in groups
        ]
        if model.is_fp16 and optimizer.get("loss_scaler") is not None:
            scaler = scaler_state(optimizer["loss_scaler"], self.state["counters"].get("global_steps", 0))
            if scaler is not None:
                self.state["loss_scaler"] = scaler
        self.topology = Topology(
            world_size=model.world_size if isinstance(model.world_size, int) else 1, stage=3 if files.is_stage3 else 1
        )
        self._order(list(model.module))

    def _groups(self, optimizer: Mapping[str, Any], model: ModelStates) -> tuple[list[dict], list[int], Any]:
        """(the optimizer's groups, the group of each dictionary of ``param_shapes``, the count of steps or None)."""
        groups = optimizer.get("param_groups")
        if not isinstance(groups, (list, tuple)):
            raise CheckpointError("has no param_groups", where=os.path.join(self.where, STATES_FOLDER, OPTIMIZER_FILE))
        # For a checkpoint of stage 3, the whole optimizer of rank 0 is kept, and its tensors are sub-groups.
        states = optimizer.get("optimizer_state_dict", {}).get("state", {})
        step = next((state["step"] for state in states.values() if "step" in state), None)
        group_of = [g for g, group in enumerate(groups) for _ in group["params"]]
        if len(group_of) != len(model.param_shapes):
            group_of = list(range(len(groups)))
        return list(groups), group_of, step

    def _add_model(self, model: ModelStates, paths: Mapping[int, str], trained: set[str], is_stage3: bool) -> None:
        for name in model.buffers:
            self._add_whole(BUFFER, name, model.tensor(name))
        if not is_stage3:
            for name in model.module:
                if name in self.aliases or name in model.buffers:
                    continue
                self._add_whole(PARAM, name, model.tensor(name))
                if name not in trained:
                    self.params[name] = ParamInfo()
            return
        shapes = model.content.get("frozen_param_shapes") or {}
        if not shapes:
            return
        n_ranks = model.world_size if isinstance(model.world_size, int) else len(paths)
        if missing := [rank for rank in range(n_ranks) if rank not in paths]:
            raise CheckpointError(f"the model files of ranks {missing} are missing", where=self.where)
        of_rank = [
            (model if rank == 0 else ModelStates(paths[rank])).content["frozen_param_fragments"]
            for rank in range(n_ranks)
        ]
        for name, shape in shapes.items():
            n_elems = math.prod(shape)
            shard_elems = -(-n_elems // n_ranks)
            pieces = [
                StoredPiece(r * shard_elems, max(0, min(shard_elems, n_elems - r * shard_elems)), fragments[name], 0)
                for r, fragments in enumerate(of_rank)
            ]
            self._add(PARAM, name, shape, of_rank[0][name].dtype, pieces)
            self.params[name] = ParamInfo()

    def _add_states(
        self, model: ModelStates, name: str, shape: tuple[int, ...], *, is_param_known: bool
    ) -> dict[str, Any]:
        """Lists the states in the parameter's folder, and returns its counts."""
        check_folder(name, self.where)
        folder = os.path.join(self.where, STATES_FOLDER, name)
        try:
            found = sorted(entry for entry in os.listdir(folder) if entry.endswith(".pt"))
        except OSError as error:
            raise CheckpointError(
                f"its states cannot be read: {error.strerror}",
                where=folder,
                fix="the conversion did not finish: run it again",
            ) from error
        counts: dict[str, Any] = {}
        for entry in found:
            state = entry.removesuffix(".pt")
            content = read_file(os.path.join(folder, entry)).content
            if is_count(content):
                counts[state] = content
                continue
            # For stage 3 the file holds only the tensor, flat. For stages 1 and 2 the tensor is in a dictionary that
            # says how tensor-parallel ranks cut it.
            stored = content.get("param") if isinstance(content, Mapping) else content
            if not isinstance(stored, StoredTensor):
                raise CheckpointError("holds no tensor", where=os.path.join(folder, entry))
            if isinstance(content, Mapping) and (content.get("vocab_tensor") or content.get("is_expert_param")):
                raise CheckpointError(
                    "is a vocabulary cut to another size, or an expert's weight", where=os.path.join(folder, entry)
                )
            if state != MASTER_FILE:
                self._add_whole(state, name, stored, shape)
            elif stored.dtype != model.tensor(name).dtype:
                self._add_whole(MASTER, name, stored, shape)
            elif not is_param_known:
                self._add_whole(PARAM, name, stored, shape)
        if MASTER_FILE + ".pt" not in found:
            raise CheckpointError(f"{MASTER_FILE}.pt is missing", where=folder, fix="run the conversion again")
        return counts
