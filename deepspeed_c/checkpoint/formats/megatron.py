"""DeepSpeed's loaders of Megatron's files: convert state dicts between numbers of tensor-parallel ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.formats.deepspeed.stand_ins import read_file
from deepspeed_c.checkpoint.formats.huggingface import parse_json
from deepspeed_c.checkpoint.formats.tensor_ranks import TensorCut, megatron_cut
from deepspeed_c.checkpoint.formats.torch_file import materialize
from deepspeed_c.errors import CheckpointError

__all__ = ["AUTO_MODULE_KEY", "MegatronSDLoader", "SDLoaderFactory"]

AUTO_MODULE_KEY = "auto"
_WHERE = "MegatronSDLoader"
# Parts of names in a file of Megatron's transformer; each occurs in some name.
_MARKS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight", "attention.query_key_value", "mlp.dense_h_to_4h.weight")


class MegatronSDLoader:
    """State dicts of Megatron's tensor-parallel ranks, for any number of ranks that divides theirs or is a multiple.

    ckpt_list: the files, in the order of ranks. version: how query, key and value lie: 0 one behind the other, 1.0 and
    2.0 head by head; None: as the file says. checkpoint_engine: an object with ``load(path, map_location)`` that reads
    the files; by default they are read as plain data, and nothing in them is executed.
    """

    def __init__(self, ckpt_list: Sequence[str], version: float | None, checkpoint_engine: Any) -> None:
        self.ckpt_list, self.version, self.checkpoint_engine = list(ckpt_list), version, checkpoint_engine
        self.module_key: str | None = None
        self.check_ckpt_list()

    def load(
        self,
        mp_world_size: int,
        mp_rank: int,
        module_key: str | None = AUTO_MODULE_KEY,
        is_pipe_parallel: bool = False,
        quantize: bool = False,
        quantize_bits: int = 8,
        quantize_groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[str, Any, tuple[None, int]]:
        """(path of the first file, content for rank ``mp_rank`` of ``mp_world_size``, (None, files that were merged)).

        module_key: where in the file the weights are; "auto": "module" or "model"; None: they are all of it. Files of a
        pipeline (``is_pipe_parallel``, with a key) hold the same for all: the first is taken. Raises CheckpointError
        for numbers of ranks that do not divide each other, tensors that do not fit, and ``quantize``.
        """
        if quantize:
            raise CheckpointError("int8 weights are not made here", where=_WHERE, fix="load without quantize")
        if mp_world_size < 1 or not 0 <= mp_rank < mp_world_size:
            raise CheckpointError(f"there is no rank {mp_rank} among {mp_world_size}", where=_WHERE)
        self.module_key = module_key
        n_files = len(self.ckpt_list)
        number = mp_rank * n_files // mp_world_size
        if is_pipe_parallel and module_key is not None and mp_world_size != n_files:
            mp_world_size, number = n_files, 0
        path, n_merged = self.ckpt_list[number], 1
        if n_files == mp_world_size:
            content = self._read(path)
        elif n_files > mp_world_size:
            content = self.merge_state_dict(mp_world_size, mp_rank)
            n_merged = n_files // mp_world_size
        else:
            content = self.split_state_dict(mp_world_size, mp_rank)
        return path, content, (None, n_merged)

    def merge_state_dict(self, mp_world_size: int, mp_rank: int) -> Any:
        """The rank's content, merged from several files."""
        files = self.get_merge_state_dicts(mp_world_size, mp_rank)
        self.sanity_check(self.ckpt_list[0])
        modules = [self.get_module(file) for file in files]
        for path, module in zip(self.ckpt_list[mp_rank * len(files) :], modules):
            if differing := sorted(set(module) ^ set(modules[0])):
                raise CheckpointError(
                    f"it and the file of its first neighbour do not both hold {differing[0]}",
                    where=path,
                    fix="list the files of one checkpoint",
                )
        version = self.get_checkpoint_version(files[0])
        merged = {
            name: self._cut_of(name, value, version).merge([module[name] for module in modules], name)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in modules[0].items()
        }
        return self.set_module(files[0], merged)

    def split_state_dict(self, mp_world_size: int, mp_rank: int) -> Any:
        """The rank's content, cut out of one file."""
        file, n_parts, number = self.get_split_state_dict(mp_world_size, mp_rank)
        version = self.get_checkpoint_version(file)
        parts = {
            # A copy: a view would keep the whole tensor.
            name: self._cut_of(name, value, version).split(value, n_parts, number, name).clone()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in self.get_module(file).items()
        }
        return self.set_module(file, parts)

    def get_merge_state_dicts(self, mp_world_size: int, mp_rank: int) -> list[Any]:
        """The contents of the files from which the rank's content is merged."""
        self._check_multiple(len(self.ckpt_list), mp_world_size)
        n = len(self.ckpt_list) // mp_world_size
        return [self._read(path) for path in self.ckpt_list[n * mp_rank : n * (mp_rank + 1)]]

    def get_split_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[Any, int, int]:
        """(the content of the file that the rank's part is in, its number of parts, the rank's among them)."""
        self._check_multiple(mp_world_size, len(self.ckpt_list))
        n = mp_world_size // len(self.ckpt_list)
        return self._read(self.ckpt_list[mp_rank // n]), n, mp_rank % n

    def get_module(self, sd: Any) -> Mapping[str, Any]:
        """The weights in a file's content. Raises CheckpointError where ``module_key`` does not say which they are."""
        key = self._key_in(sd)
        return sd if key is None else sd[key]

    def set_module(self, sd: Any, module: Mapping[str, Any]) -> Any:
        """The content with other weights."""
        key = self._key_in(sd)
        return module if key is None else {**sd, key: module}

    def check_ckpt_list(self) -> None:
        """Raises CheckpointError if there is no file, or if their number differs from the number in the first file."""
        if not self.ckpt_list:
            raise CheckpointError("there are no files", where=_WHERE, fix="list the files of all ranks, in order")
        saved = self._read(self.ckpt_list[0])
        n = saved.get("mp_world_size") if isinstance(saved, Mapping) else None
        if n is not None and n != len(self.ckpt_list):
            raise CheckpointError(
                f"was saved by {n} ranks, and {len(self.ckpt_list)} files are listed",
                where=self.ckpt_list[0],
                fix="list the files of all ranks, in order",
            )

    def sanity_check(self, ckpt_file_name: str) -> None:
        """Raises CheckpointError if a file lacks the names of Megatron's transformer."""
        names = list(self.get_module(self._read(ckpt_file_name)))
        for mark in _MARKS:
            if not any(mark in name for name in names):
                raise CheckpointError(f"has no {mark}", where=ckpt_file_name, fix="list files of Megatron's")

    def get_checkpoint_version(self, state_dict: Any) -> float:
        """Version, which decides the order of query, key and value (see ``megatron_cut``)."""
        return self.version if self.version is not None else state_dict.get("checkpoint_version", 0)

    def _key_in(self, content: Any) -> str | None:
        if self.module_key is None:
            return None
        keys = ("module", "model") if self.module_key == AUTO_MODULE_KEY else (self.module_key,)
        found = [key for key in keys if isinstance(content, Mapping) and key in content]
        if len(found) != 1:
            raise CheckpointError(
                f"holds {' and '.join(found) or 'none'} of {', '.join(keys)}",
                where=self.ckpt_list[0],
                fix="say in module_key which of the file's keys has the weights",
            )
        return found[0]

    def _read(self, path: str) -> Any:
        if self.checkpoint_engine is not None:
            return self.checkpoint_engine.load(path, map_location="cpu")
        return materialize(read_file(os.fspath(path)).content)

    @staticmethod
    def _cut_of(name: str, value: torch.Tensor, version: float) -> TensorCut:
        cut = megatron_cut(name, version)
        if cut is None or cut.dim is None or cut.dim >= value.dim():
            # As in DeepSpeed, a tensor without a rule is taken from the first file: ranks may have rounded it
            # differently.
            return TensorCut(None, takes_first=True)
        return cut

    @staticmethod
    def _check_multiple(many: int, few: int) -> None:
        if many % few:
            raise CheckpointError(
                f"{many} is no multiple of {few}: so many files or ranks cannot become so few",
                where=_WHERE,
                fix="load with a number of ranks that divides the number of files, or is a multiple of it",
            )


class SDLoaderFactory:
    """Chooses the loader of a list of files."""

    @staticmethod
    def get_sd_loader_json(json_file: str | Mapping[str, Any], checkpoint_engine: Any = None) -> Any:
        """A loader from {"type", "checkpoints", "version"}, or a file with it; of the types "bloom" and "ds_model" the
        mapping itself, as in DeepSpeed. Raises CheckpointError for missing keys.
        """
        where = "get_sd_loader_json"
        data: Any = json_file
        if not isinstance(json_file, Mapping):
            where = os.fspath(json_file)
            try:
                with open(where, "rb") as file:
                    data = parse_json(file.read(), where)
            except OSError as error:
                raise CheckpointError(f"cannot be read: {error.strerror}", where=where) from error
        for key in ("type", "checkpoints", "version"):
            if not isinstance(data, Mapping) or key not in data:
                raise CheckpointError(f"has no {key!r}", where=where, fix='write "type", "checkpoints" and "version"')
        if str(data["type"]).lower() in ("bloom", "ds_model"):
            return data
        return SDLoaderFactory.get_sd_loader(data["checkpoints"], checkpoint_engine, data["type"], data["version"])

    @staticmethod
    def get_sd_loader(
        ckpt_list: Sequence[str], checkpoint_engine: Any = None, sd_type: str = "Megatron", version: float | None = None
    ) -> MegatronSDLoader:
        """The loader of files of ``sd_type``. Raises CheckpointError for another than "Megatron"."""
        if sd_type != "Megatron":
            raise CheckpointError(f"{sd_type!r} is no kind of files", where="get_sd_loader", fix='write "Megatron"')
        return MegatronSDLoader(ckpt_list, version, checkpoint_engine)
