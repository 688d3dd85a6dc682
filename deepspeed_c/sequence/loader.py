"""Turns batches of whole sequences into this rank's parts of them: ``UlyssesSPDataLoaderAdapter``.

Each rank of a group that shares sequences loads its own batches. The ranks train on all of these batches, one after
another. In each step all ranks work on one batch, and each rank gets only its part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed_c.errors import ModelError, RankMismatchError, StateError
from deepspeed_c.sequence.collectives import TokenOrder, order_of, ranks_of
from deepspeed_c.sequence.plans import SequenceCut

__all__ = ["UlyssesSPDataLoaderAdapter"]

IGNORED = -100
# The description of a batch of some ten tensors takes a tenth of this.
_USUAL_HEADER_BYTES = 4088
# Values for added tokens, if the number of ranks does not divide the length.
_FILL = {"labels": IGNORED, "shift_labels": IGNORED}


class UlyssesSPDataLoaderAdapter:
    """Gives this rank its part of each batch that a rank of ``sp_group`` loads with ``dl``.

    A batch is a mapping. It has to contain ``input_ids`` [batch, tokens] and ``labels`` (or ``shift_labels``). If it
    has no ``position_ids``, they are added. Tensors [batch, tokens, ...] of any rank and dtype are cut along their
    tokens; other values are passed on unchanged. Labels are shifted before the cut and become ``shift_labels``;
    ``labels`` are removed. If ranks do not divide the length, tokens 0 without labels are added at the end. The parts
    lie in host memory, in the order of the attention that the engine has chosen.

    sp_rank, sp_world_size: must be those of ``sp_group``. device: for the exchange, if the group's backend does not
    support the CPU. model: the model for which the batches are, or its engine. It must be given if models over
    ``sp_group`` want different orders.
    """

    def __init__(
        self,
        dl: Any,
        sp_rank: int,
        sp_group: Any,
        sp_world_size: int,
        device: Any,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.dl, self._model = dl, model
        self.sp_rank, self.sp_group, self.sp_world_size, self.device = sp_rank, sp_group, sp_world_size, device
        self._comm = ranks_of(sp_group)
        if (self._comm.rank, self._comm.world_size) != (sp_rank, sp_world_size):
            raise StateError(
                f"sp_rank is {sp_rank} of {sp_world_size}, the group says {self._comm.rank} of {self._comm.world_size}",
                where="UlyssesSPDataLoaderAdapter",
                fix="pass mpu.get_sequence_parallel_rank(), its group and its world size",
            )
        self.micro_batches: deque[dict[str, Any]] = deque()
        self.iter: Iterator[Any] | None = None
        self._n_given = 0  # batches given in this pass over dl
        self._n_to_skip = 0
        # accelerate's skip_first_batches looks at these attributes, so that it skips among this adapter's batches, not
        # among dl's.
        self.dataset = _Given(self)
        self.batch_size, self.batch_sampler, self.sampler, self.drop_last = None, None, None, False
        self.num_workers, self.collate_fn, self.pin_memory = 0, _as_it_is, False

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        """Begin a pass over the data, at the position given to ``load_state_dict``."""
        self._begin()
        return self

    def _begin(self) -> None:
        self.iter, self._n_given = iter(self.dl), 0
        self.micro_batches.clear()
        n_whole, n_more = divmod(self._n_to_skip, self.sp_world_size)
        skips, self._n_to_skip = (n_whole, n_more), 0
        for _ in range(skips[0]):
            next(self.iter)
        self._n_given = n_whole * self.sp_world_size
        for _ in range(skips[1]):
            next(self)

    def __next__(self) -> dict[str, Any]:
        if self.iter is None:
            self._begin()
        if not self.micro_batches:
            self.refill()
        self._n_given += 1
        return self.micro_batches.popleft()

    def state_dict(self) -> dict[str, int]:
        """The number of batches that this pass over the data has given."""
        return {"batches": self._n_given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next pass begin after the batches counted in ``state``."""
        self._n_to_skip, self.iter = state["batches"], None

    def refill(self) -> None:
        """Load a batch on each rank, and get this rank's parts of all these batches. Collective.

        Raises StopIteration, on all ranks, at the end of the data. Raises ModelError for a batch that cannot be cut, on
        the ranks that have it. Raises StateError where several orders are possible and ``model`` is not given. Raises
        RankMismatchError, on all ranks, where batches or orders of the ranks do not fit together.
        """
        batch, problem, order = None, None, None
        try:
            order = order_of(self.sp_group, self._model)
            batch = self._prepare(next(self.iter), order)
        except StopIteration:
            self.iter = None
        except (ModelError, StateError) as error:
            problem = error
        header = None if batch is None else {key: _describe(value) for key, value in batch.items()}
        everyone = self._comm.gather_small_objects(
            (header, str(problem or ""), order), _USUAL_HEADER_BYTES, label="batches of the ranks of a sequence"
        )
        if problem is not None:
            raise problem
        headers = [each for each, _, _ in everyone]
        self._check([text for _, text, _ in everyone], headers, [each for _, _, each in everyone])
        if header is None:
            raise StopIteration
        self.micro_batches.extend(self._exchange(batch, headers, order))

    def _prepare(self, batch: Any, order: TokenOrder) -> dict[str, Any]:
        """Add positions and shifted labels to a batch, and pad it to a length that the ranks divide."""
        if not isinstance(batch, Mapping) or not torch.is_tensor(batch.get("input_ids")):
            raise _unfit(f"the batch is a {type(batch).__name__} without input_ids", "use a collator that gives a dict")
        batch = {key: value.detach() if torch.is_tensor(value) else value for key, value in batch.items()}
        shape = batch["input_ids"].shape
        if len(shape) != 2:
            raise _unfit(f"input_ids are {tuple(shape)}", "give [batch, tokens]")
        if "labels" not in batch and "shift_labels" not in batch:
            raise _unfit(
                f"there are no labels, but {', '.join(batch)}",
                "have the collator give labels [batch, tokens], -100 where a token is none",
            )
        n_tokens = shape[1]
        if "position_ids" not in batch:
            batch["position_ids"] = torch.arange(n_tokens, device=batch["input_ids"].device).expand(shape)
        if "labels" in batch:
            labels = batch.pop("labels")
            if labels.shape != shape:
                raise _unfit(f"labels are {tuple(labels.shape)}, input_ids {tuple(shape)}", "give one label a token")
            if "shift_labels" not in batch:
                batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # All ranks get as many tokens; in a ring they also get as many from either end.
        parts = self.sp_world_size * (2 if order.order == "zigzag" else 1)
        n_more = -n_tokens % parts
        for key, value in batch.items():
            if torch.is_tensor(value) and value.dim() > 1:
                if value.shape[1] != n_tokens or (key.endswith("mask") and value.dim() > 2):
                    raise _unfit(
                        f"{key} is {tuple(value.shape)}, and there are {n_tokens} tokens",
                        "give masks as [batch, tokens], and other tensors with the tokens in dimension 1, or of 1"
                        " dimension",
                    )
                batch[key] = _fill_up(key, value, n_more) if n_more else value
        return batch

    def _check(
        self, problems: list[str], headers: list[dict[str, Any] | None], orders: list[TokenOrder | None]
    ) -> None:
        ranks = self._comm.global_ranks
        for rank, text in zip(ranks, problems):
            if text:
                raise RankMismatchError(
                    f"rank {rank} has a batch that cannot be cut: {text}",
                    where="UlyssesSPDataLoaderAdapter",
                    fix="see there",
                )
        other = next((i for i, order in enumerate(orders) if order != orders[0]), None)
        if other is not None:
            raise RankMismatchError(
                f"rank {ranks[0]} would cut batches in the order {orders[0]}, and rank {ranks[other]} in {orders[other]}",
                where="UlyssesSPDataLoaderAdapter",
                fix="pass the same model, and close the same engines, on all ranks",
            )
        first = headers[0]
        for rank, header in zip(ranks, headers):
            mine, theirs = (None if each is None else set(each) for each in (first, header))
            if mine != theirs:
                what = ["no batch any more" if keys is None else ", ".join(sorted(keys)) for keys in (mine, theirs)]
                raise RankMismatchError(
                    f"rank {ranks[0]} has {what[0]}, and rank {rank} {what[1]}",
                    where="UlyssesSPDataLoaderAdapter",
                    fix="give all ranks as many batches with the same keys (drop_last, or a sampler that fills up)",
                )

    def _exchange(
        self, batch: dict[str, Any], headers: list[dict[str, Any]], order: TokenOrder
    ) -> Iterator[dict[str, Any]]:
        """This rank's part of each rank's batch, from one exchange of bytes."""
        comm, n_ranks = self._comm, self.sp_world_size
        device = comm._number_device
        parts = [self._parts_for(batch, rank, order) for rank in range(n_ranks)]
        sent = [torch.cat([_bytes_of(t) for t in of_rank] or [torch.empty(0, dtype=torch.uint8)]) for of_rank in parts]
        got = [sum(_n_bytes(info, n_ranks) for info in header.values()) for header in headers]
        flat, received = torch.cat(sent).to(device), torch.empty(sum(got), dtype=torch.uint8, device=device)
        comm.all_to_all(flat, received, [t.numel() for t in sent], got, label="parts of batches").wait()
        for header, block in zip(headers, received.cpu().split(got)):
            found, begin = {}, 0
            for key, info in header.items():
                if not isinstance(info, _SentTensor):
                    found[key] = info
                    continue
                end = begin + _n_bytes(info, n_ranks)
                found[key] = block[begin:end].clone().view(info.dtype).view(info.part_shape(n_ranks))
                begin = end
            yield found

    def _parts_for(self, batch: dict[str, Any], rank: int, order: TokenOrder) -> list[torch.Tensor]:
        parts, cut = [], SequenceCut(batch["input_ids"].shape[1], self.sp_world_size, *order)
        for value in batch.values():
            if torch.is_tensor(value):
                parts.append(value if value.dim() < 2 else cut.take(value, rank, 1))
        return parts


class _Given(torch.utils.data.IterableDataset):
    """The batches of an adapter, as a dataset."""

    def __init__(self, adapter: UlyssesSPDataLoaderAdapter) -> None:
        self._adapter = adapter

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._adapter)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._adapter.dl.dataset, name)


class _SentTensor:
    """The description of a tensor of a batch that is sent to other ranks."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def part_shape(self, n_ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        if len(self.shape) < 2:
            return self.shape
        return (self.shape[0], self.shape[1] // n_ranks, *self.shape[2:])


def _as_it_is(batch: Any) -> Any:
    return batch


def _unfit(what: str, fix: str) -> ModelError:
    return ModelError(what, where="UlyssesSPDataLoaderAdapter", fix=fix)


def _describe(value: Any) -> Any:
    return _SentTensor(tuple(value.shape), value.dtype) if torch.is_tensor(value) else value


def _n_bytes(info: Any, n_ranks: int) -> int:
    if not isinstance(info, _SentTensor):
        return 0
    return torch.Size(info.part_shape(n_ranks)).numel() * info.dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _fill_up(key: str, value: torch.Tensor, n_more: int) -> torch.Tensor:
    """``value`` with ``n_more`` tokens added at the end. Positions count on, so that no document begins there."""
    if key == "position_ids":
        last = value[:, -1:] if value.shape[1] else value.new_full((value.shape[0], 1), -1)
        return torch.cat([value, last + torch.arange(1, n_more + 1, device=value.device)], 1)
    shape = list(value.shape)
    shape[1] = n_more
    return torch.cat([value, value.new_full(shape, _FILL.get(key, 0))], 1)
