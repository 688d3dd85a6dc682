"""Moving model states out of the accelerator's memory for a while, and back (``offload_states``, ``reload_states``)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.transports.blocks import discard
from deepspeed_c.config.offload import Aio
from deepspeed_c.config.zero import Zero
from deepspeed_c.engine.no_optimizer import NoOptimizer
from deepspeed_c.errors import AioError, ConfigError, OffloadError
from deepspeed_c.offload.place import make_swapper, raise_together
from deepspeed_c.offload.swap import Swapper, SwapSettings, whole_pages
from deepspeed_c.zero.layout.layout import Layout
from deepspeed_c.zero.layout.unit import Unit
from deepspeed_c.zero.states.home import Tagged
from deepspeed_c.zero.states.optimizer import ZeroOptimizer

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "OffloadedStates"]

WHERE = "offload_states"
# Bytes of one transfer: large enough for the device's full speed, small in comparison with the states.
PIECE_BYTES = 32 << 20
# Repeated, this byte is a NaN in every floating-point dtype.
NAN_BYTE = 0xFF


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state (DeepSpeed's names)."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadDeviceEnum(str, Enum):
    """The places that states can be moved to (DeepSpeed's names)."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class _Copy(Protocol):
    """A copy of a storage's bytes in another place."""

    def read_into(self, target: torch.Tensor, non_blocking: bool) -> None: ...


class _HostCopy:
    def __init__(self, source: torch.Tensor, pin_memory: bool, non_blocking: bool) -> None:
        is_pinned = pin_memory and source.device.type != "cpu"
        self._bytes = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=is_pinned)
        self._bytes.copy_(source, non_blocking=non_blocking)

    def read_into(self, target: torch.Tensor, non_blocking: bool) -> None:
        target.copy_(self._bytes, non_blocking=non_blocking)


class _FileCopy:
    """A copy in a file, in pieces. ``name``: the name of the whole in errors. The copy is complete after a wait for the
    file."""

    def __init__(self, file: Swapper, source: torch.Tensor, name: str) -> None:
        self._file = file
        self._pieces: list[Tagged] = []
        for begin in range(0, source.numel(), PIECE_BYTES):
            # A piece of host memory is a view, so nothing is copied.
            piece = Tagged(source[begin : begin + PIECE_BYTES].cpu(), f"{name}, from byte {begin} on")
            self._pieces.append(piece)
            file.send([piece])

    def read_into(self, target: torch.Tensor, non_blocking: bool) -> None:
        begin = 0
        for index, piece in enumerate(self._pieces):
            self._file.bring([piece])
            self._file.prefetch(self._pieces[index + 1 : index + 2])
            n_bytes = piece.tensor.numel()
            target[begin : begin + n_bytes].copy_(piece.tensor)  # blocking, because the buffer is used again
            self._file.let_go([piece])
            begin += n_bytes


class _Moved(NamedTuple):
    storage: torch.UntypedStorage  # without memory
    n_bytes: int
    copy: _Copy


def _take_back(storage: torch.UntypedStorage, n_bytes: int) -> None:
    """Gives new memory to a storage whose memory was freed. The caller then writes to it."""
    if storage.resizable():
        storage.resize_(n_bytes)


class _Found(NamedTuple):
    storage: torch.UntypedStorage
    names: list[str]  # its tensors' names

    @property
    def name(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"


class OffloadedStates:
    """Tensors of states and weights (``Unit.states``, ``Unit.weights``) that are moved out of memory for a while. The
    tensors stay the same objects, but their storage has no memory until ``reload``. After ``reload`` every view of them
    is valid again."""

    def __init__(
        self, layout: Layout, optimizer: ZeroOptimizer | NoOptimizer, zero: Zero, aio: Aio, comm: Collectives
    ) -> None:
        self._layout, self._optimizer, self._comm = layout, optimizer, comm
        self._aio, self._folder = aio, zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
        self._away: dict[OffloadStateTypeEnum, list[_Moved]] = {}
        self._files: list[Swapper] = []

    @property
    def kinds(self) -> set[OffloadStateTypeEnum]:
        return set(self._away)

    def n_bytes(self, device: str) -> int:
        """Bytes that ``offload`` of all kinds to ``device`` moves out of memory, with those that are out already."""
        found = self._find(list(OffloadStateTypeEnum), getattr(device, "value", device))
        in_memory = sum(storage.nbytes() for storages in found.values() for storage, _ in storages)
        return in_memory + sum(moved.n_bytes for of_kind in self._away.values() for moved in of_kind)

    def offload(
        self, include: Container[OffloadStateTypeEnum] | None, device: str, pin_memory: bool, non_blocking: bool
    ) -> None:
        """Moves the states of the kinds in ``include`` (None: all) to host memory or to a file. States that have been
        moved out already stay where they are.

        A move to a file is collective. It raises on all ranks alike, before anything has been moved: ConfigError if a
        rank has no folder or too little space there, OffloadError if a rank cannot write.
        """
        device = getattr(device, "value", device)
        if device not in {place.value for place in OffloadDeviceEnum}:
            raise ConfigError(f"{device!r} is no place for states", where=WHERE, fix='use "cpu" or "nvme"')
        wanted = [
            kind
            for kind in OffloadStateTypeEnum
            if kind not in self._away and (include is None or kind in include or kind.value in include)
        ]
        if device == "none" or not wanted:
            return
        self._optimizer.settle(frees_copies=True)
        found = self._find(wanted, device)
        if device == "nvme":
            copies: dict[OffloadStateTypeEnum, list[_Copy]] = self._write(found)
        else:
            copies = {
                kind: [_HostCopy(_bytes_of(storage), pin_memory, non_blocking) for storage, _ in storages]
                for kind, storages in found.items()
            }
            if non_blocking and torch.accelerator.is_available():
                torch.accelerator.synchronize()  # the storage's memory is freed next
        for kind, storages in found.items():
            self._away[kind] = [
                _Moved(storage, storage.nbytes(), copy) for (storage, _), copy in zip(storages, copies[kind])
            ]
            for storage, _ in storages:
                discard(storage)
        if OffloadStateTypeEnum.contiguous_grad_buffer in wanted:
            self._optimizer.drop_spare_buffers()

    def reload(self, non_blocking: bool) -> None:
        """Moves all states back.

        Collective if states are in a file. Raises OffloadError on all ranks if a rank cannot read back the bytes that
        it wrote. The states that it could not read stay out of memory, and ``reload`` may be called again.
        """
        problem = None
        try:
            self._read_back(non_blocking)
        except (AioError, OffloadError) as error:
            fix = "call reload_states() again; where it fails again, make a new engine and load a checkpoint"
            problem = OffloadError(error.what, where=error.where, fix=fix)
        if self._files:
            raise_together(problem, OffloadError, WHERE, self._comm)
            self._close_files()

    def close(self) -> None:
        """Moves back all states that can be read and frees the files. It involves no other rank. States that cannot be
        read become NaN, and the error says why."""
        try:
            self._read_back(non_blocking=False)
        finally:
            for moved in self._away.values():
                for storage, n_bytes, _ in moved:
                    _take_back(storage, n_bytes)
                    _bytes_of(storage).fill_(NAN_BYTE)
            self._away.clear()
            self._close_files()

    def _read_back(self, non_blocking: bool) -> None:
        for kind, moved in list(self._away.items()):
            while moved:
                storage, n_bytes, copy = moved[-1]
                _take_back(storage, n_bytes)
                try:
                    copy.read_into(_bytes_of(storage), non_blocking)
                except BaseException:
                    discard(storage)
                    raise
                moved.pop()
            del self._away[kind]

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def _write(self, found: dict[OffloadStateTypeEnum, list[_Found]]) -> dict[OffloadStateTypeEnum, list[_Copy]]:
        """Copies all of ``found`` to one new file without a name. Its space is freed when it is closed, however the
        process ends. Collective."""
        if not self._folder:
            raise ConfigError(
                "the configuration names no folder on NVMe",
                where=WHERE,
                fix='set "zero_optimization": {"offload_optimizer": {"nvme_path": ...}}, or offload_states(device="cpu")',
            )
        storages = [storage for found_of_kind in found.values() for storage, _ in found_of_kind]
        n_bytes = sum(
            whole_pages(min(PIECE_BYTES, storage.nbytes() - begin))
            for storage in storages
            for begin in range(0, storage.nbytes(), PIECE_BYTES)
        )
        file = make_swapper(self._folder, n_bytes, SwapSettings.of(self._aio), WHERE, self._comm)
        with ExitStack() as undo:
            undo.callback(file.close)
            problem = None
            copies: dict[OffloadStateTypeEnum, list[_Copy]] = {}
            try:
                for kind, found_of_kind in found.items():
                    copies[kind] = [_FileCopy(file, _bytes_of(each.storage), each.name) for each in found_of_kind]
                file.wait()
            except (AioError, OffloadError) as error:
                fix = "training can go on, everything is still in memory; free space there or use another device"
                problem = OffloadError(error.what, where=error.where, fix=fix)
            raise_together(problem, OffloadError, WHERE, self._comm)
            undo.pop_all()
        self._files.append(file)
        return copies

    def _find(self, kinds: Sequence[OffloadStateTypeEnum], device: str) -> dict[OffloadStateTypeEnum, list[_Found]]:
        """The storages of ``kinds``. Each is listed once, because several tensors, even of different kinds, may share a
        storage."""
        seen = {moved.storage._cdata for moved_of_kind in self._away.values() for moved in moved_of_kind}
        found: dict[OffloadStateTypeEnum, list[_Found]] = {}
        for kind in kinds:
            of_kind: dict[int, _Found] = {}
            for tagged in self._tensors(kind, device):
                storage = tagged.tensor.untyped_storage()
                if storage._cdata in of_kind:
                    of_kind[storage._cdata].names.append(tagged.name)
                elif storage.nbytes() > 0 and storage._cdata not in seen:
                    of_kind[storage._cdata] = _Found(storage, [tagged.name])
            seen |= of_kind.keys()
            found[kind] = list(of_kind.values())
        return found

    def _tensors(self, kind: OffloadStateTypeEnum, device: str) -> Iterator[Tagged]:
        """The tensors of a kind in the memory of all units' homes, except for tensors that are in the memory of
        ``device`` already."""
        for unit in (*self._layout.trained, *self._layout.frozen):
            home = unit.weights if kind is OffloadStateTypeEnum.lp_params else unit.states
            if device == "cpu" and home.memory == "host":
                continue
            if kind is OffloadStateTypeEnum.lp_grads:
                # The sums of gradients lie in the memory in which states are used.
                yield from (Tagged(part, f"gradients of {_names(unit)}") for part in self._optimizer.sums_of(unit))
            elif kind is not OffloadStateTypeEnum.contiguous_grad_buffer:
                is_master = kind is OffloadStateTypeEnum.hp_params
                for bucket in range(unit.n_buckets):
                    yield from (tagged for tagged in home.in_memory(bucket) if tagged.is_master == is_master)


def _names(unit: Unit) -> str:
    first, last = unit.slots[0].name, unit.slots[-1].name
    return first if first == last else f"{first} to {last}"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))
