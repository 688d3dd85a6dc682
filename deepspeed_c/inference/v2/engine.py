"""The ragged engine: sequences come, go on and end by uid, and any of them share a forward.

A prompt, a piece of one and a single new token are all rows of one forward, behind one another. The model is
transformers' own, made ready by ``init_inference``; keys and values lie in blocks (``kv/ragged.py``). A sequence's
result does not depend on its neighbours.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed_c import _C, kv
from deepspeed_c.accelerator import Accelerator
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.ragged import AllocationMode, RaggedInferenceEngineConfig
from deepspeed_c.errors import ConfigError, DeepSpeedCError, FeatureError, ModelError, StateError
from deepspeed_c.inference.engine import InferenceEngine
from deepspeed_c.inference.limits import positions_of
from deepspeed_c.inference.v2.batch import RaggedBatchWrapper
from deepspeed_c.inference.v2.deterministic import Deterministic, require_row_wise
from deepspeed_c.inference.v2.scheduling import SchedulingError, SchedulingResult
from deepspeed_c.inference.v2.state import DSSequenceDescriptor, DSStateManager, PlaceholderSequenceDescriptor
from deepspeed_c.inject.few_rows import few_row_products
from deepspeed_c.kv.group import NeedsOwnCache, blocks_of
from deepspeed_c.logging import log_dist
from deepspeed_c.ops.kv import BLOCK_TOKENS
from deepspeed_c.threads import one_torch_thread
from deepspeed_c.weights.configs import save_configs

__all__ = ["FORMAT", "METADATA", "EngineLimits", "InferenceEngineV2"]

METADATA = "ds_engine_v2.json"
FORMAT = 1
# Tokens that the core can number, in one sequence.
_MOST_TOKENS = (1 << 31) - 1
# Lengths of the two sequences that a model is tried with, each in two pieces.
_TRIED = (5, 3)
_PIECES = (slice(0, 2), slice(2, None))
# More rows than few_rows multiplies by itself, and a few.
_TRIED_BITS = (37, 3)
# Elements of hidden states: more of them are worth torch's threads. An operator of fewer takes less than a millisecond
# on one thread, and others would spin longer than that.
_MOST_ON_ONE_THREAD = 1 << 20


class EngineLimits(NamedTuple):
    """The room of an engine. A scheduler plans within these numbers."""

    n_blocks: int
    """Blocks of keys and values of one group of layers."""
    step_tokens: int
    """Tokens of one ``put``."""
    step_sequences: int
    """Sequences of one ``put``, and at one time."""
    sequence_tokens: int
    """Tokens of one sequence, new ones too."""
    n_words: int
    """Words of the model's vocabulary."""


class InferenceEngineV2:
    """Runs sequences of any lengths in one forward.

    Args:
        policy: the engine of ``init_inference`` around a model of transformers that generates.
        engine_config: limits and memory.
        kv_cache_memory_bytes: for keys and values on this rank, in place of ``memory_config``.

    Raises FeatureError for a family whose tokens cannot lie behind one another, StateError where the memory has no room
    for one sequence, ConfigError for bytes that have no room for one of ``max_context`` tokens, or that are not free.
    """

    def __init__(
        self,
        policy: InferenceEngine,
        engine_config: RaggedInferenceEngineConfig,
        kv_cache_memory_bytes: int | None = None,
    ) -> None:
        self._host, self._config = policy, engine_config
        self._module = policy.module
        limit = positions_of(self._module)[1]
        manager = engine_config.state_manager
        self._max_context = min(manager.max_context, _MOST_TOKENS if limit is None else limit)
        text = self._module.config.get_text_config(decoder=True)
        self._words = text.vocab_size
        is_own = policy.multiplies_by_core or engine_config.deterministic
        self._most_rows_on_one_thread = _MOST_ON_ONE_THREAD // text.hidden_size if is_own else 0
        self._batch = RaggedBatchWrapper(manager, self._words)
        self._attending = kv.attention.Attending.of(self._module)
        takes = inspect.signature(self._module.forward).parameters
        self._keeps_last = "logits_to_keep" in takes
        self._takes_positions = "position_ids" in takes
        self._mode = Deterministic if engine_config.deterministic else nullcontext
        self._undo = ExitStack()
        self._undo.enter_context(few_row_products(self._module))
        try:
            n_bytes = self._try_out(takes)
            if engine_config.deterministic:
                self._compare_bits()
            given = kv_cache_memory_bytes
            n_blocks = self._n_blocks(n_bytes) if given is None else self._n_blocks_in(given, n_bytes)
            cache = kv.ragged.RaggedCache(self._module.config, n_blocks, finds_prefixes=manager.enable_prefix_caching)
        except BaseException:
            self._undo.close()
            raise
        self._state = DSStateManager(manager, cache)
        self._tell(
            f"ragged engine: {cache.groups[0].n_blocks} blocks of {self._state.kv_block_size} tokens in"
            f" {len(cache.groups)} group(s), {self._max_context} tokens a sequence"
        )

    def _tell(self, line: str) -> None:
        log_dist(line, ranks=[0])

    @property
    def free_blocks(self) -> torch.Tensor:
        """Free blocks of keys and values, int64 [groups of layers with one window]."""
        return self._state.free_blocks

    @property
    def n_kv_cache_groups(self) -> int:
        """Groups of layers with one window."""
        return self._state.n_kv_cache_groups

    @property
    def limits(self) -> EngineLimits:
        """The limits that hold for each ``put``."""
        manager = self._config.state_manager
        return EngineLimits(
            min(group.n_blocks for group in self._state.cache.groups),
            manager.max_ragged_batch_size,
            min(manager.max_ragged_sequence_count, manager.max_tracked_sequences),
            self._max_context,
            self._words,
        )

    def model(self) -> torch.nn.Module:
        """The model."""
        return self._module

    def count_found(self, tokens: torch.Tensor, salt: str = "") -> int:
        """How many of ``tokens``, integers [tokens], a new sequence would find at their front: blocks of sequences with
        the same ``salt`` that are still in the memory. The last token is never among them."""
        return self._state.cache.count_found(torch.as_tensor(tokens).tolist(), salt)

    def put(
        self,
        batch_uids: Iterable[int],
        batch_tokens: Iterable[torch.Tensor],
        do_checks: bool = True,
        salts: Mapping[int, str] | None = None,
    ) -> torch.Tensor:
        """Runs new tokens of sequences in one forward. A uid that is not known begins a sequence.

        batch_tokens: integers [tokens] of each uid. do_checks: False leaves out the limits of numbers, which
        ``can_schedule`` has answered; the memory is checked anyway. salts: of new uids. With
        ``enable_prefix_caching`` full blocks of tokens that were computed before, under the same salt, are not computed
        again.

        Returns the logits of the last token of each sequence, [sequences, words]. On tensor-parallel ranks all ranks
        make the same call. Raises SchedulingError for a batch beyond a limit, ModelError for tokens that are no words
        of the model, an empty batch and a uid that comes twice. Nothing is changed then; after an exception within the
        forward all sequences are as they were.
        """
        uids, tokens = list(batch_uids), [torch.as_tensor(each) for each in batch_tokens]
        self._check_tokens(uids, tokens)
        if do_checks:
            self._require(uids, [each.numel() for each in tokens])
        known = set(self._state.tracked_sequences)
        try:
            salts = salts or {}
            sequences = [self._state.get_or_create_sequence(uid, salts.get(uid, "")) for uid in uids]
            return self._run(sequences, tokens)
        except BaseException:
            for uid in uids:
                if uid not in known and self._state.get_sequence(uid) is not None:
                    self._state.flush_sequence(uid)
            raise

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: Any) -> tuple[int, int]:
        """(tokens of at most ``max_request_tokens`` that have room, the blocks that they take), for at most
        ``max_request_blocks`` blocks, a number or a tensor by group. (0, 0) for a new sequence where there are
        ``max_tracked_sequences`` already."""
        found = self._state.get_sequence(uid)
        if found is None and self._state.n_tracked_sequences >= self._config.state_manager.max_tracked_sequences:
            return 0, 0
        return self._room(found, max_request_tokens, int(torch.as_tensor(max_request_blocks).min()))

    def can_schedule(self, uids: Iterable[int], lengths: Iterable[int]) -> SchedulingResult:
        """Whether a ``put`` of so many tokens of each uid fits. Raises ModelError for a negative length."""
        lengths = list(lengths)
        if min(lengths, default=0) < 0:
            raise ModelError(
                f"a sequence has {min(lengths)} new tokens", where="can_schedule", fix="pass numbers of new tokens"
            )
        return self._limit_of(list(uids), lengths)[0]

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Tokens that need no further block; 0 for a uid that is not known."""
        found = self._state.get_sequence(uid)
        return 0 if found is None else -found.seen_tokens % self._state.kv_block_size

    def holds(self, uid: int) -> bool:
        """Whether the engine knows the sequence."""
        return self._state.get_sequence(uid) is not None

    def flush(self, uid: int) -> None:
        """Ends a sequence. Raises StateError for a uid that is not known."""
        self._state.flush_sequence(uid)

    def serialize(self, save_path: str) -> None:
        """Writes the whole model into the folder ``save_path``: safetensors, and JSON that
        ``build_engine_from_ds_checkpoint`` reads. On tensor-parallel ranks all ranks call it."""
        self._host.save_16bit_model(save_path, "model.safetensors")
        if torch.distributed.get_rank() == 0:
            architecture = type(self._module).__name__
            save_configs(self._module.config, self._module.generation_config, architecture, save_path)
            text = json.dumps({"format": FORMAT, "architecture": architecture}, indent=2)
            (Path(save_path) / METADATA).write_text(text + "\n", encoding="utf-8")

    def destroy(self) -> None:
        """Ends the engine, and gives the model its own forward back."""
        self._undo.close()
        self._host.destroy()

    def _check_tokens(self, uids: Sequence[int], tokens: Sequence[torch.Tensor]) -> None:
        what = ""
        if len(uids) != len(tokens):
            what = f"{len(uids)} uids came with tokens of {len(tokens)}"
        elif not uids:
            what = "the batch has no sequence"
        elif len(set(uids)) < len(uids):
            what = f"the uid {next(uid for uid in uids if uids.count(uid) > 1)} comes twice"
        for uid, each in zip(uids, tokens):
            if what:
                break
            if each.dim() != 1 or not each.numel() or each.is_floating_point():
                what = f"the tokens of {uid} are {tuple(each.shape)} {each.dtype}; integers [tokens] are expected"
        if what:
            raise ModelError(what, where="put", fix="pass each uid once, with one token or more of the vocabulary")

    def _require(self, uids: Sequence[int], lengths: Sequence[int]) -> None:
        result, what = self._limit_of(uids, lengths)
        if result is not SchedulingResult.Success:
            raise SchedulingError(result, what, fix="put fewer sequences or tokens, or flush sequences that have ended")

    def _limit_of(self, uids: Sequence[int], lengths: Sequence[int]) -> tuple[SchedulingResult, str]:
        """(the first limit that a batch exceeds, both numbers)."""
        manager, known = self._config.state_manager, self._state
        n_sequences = known.n_tracked_sequences + sum(known.get_sequence(uid) is None for uid in set(uids))
        found = map(known.get_sequence, uids)
        seen = [0 if sequence is None else sequence.seen_tokens for sequence in found]
        n_needed, row = _C.kv_batch_count(seen, lengths, self._max_context)
        result = SchedulingResult
        if row >= 0:
            what = f"sequence {uids[row]} would have {seen[row] + lengths[row]} tokens, and {self._max_context} are the most"
            return result.SequenceTokenLimitExceeded, what
        n_free = min(known.cache.n_free)
        limits = (
            (result.BatchSequenceLimitExceeded, "sequences", len(uids), manager.max_ragged_sequence_count),
            (result.KVCacheLimitExceeded, "further blocks of keys and values", n_needed, n_free),
            (result.EngineSequenceLimitExceeded, "sequences at one time", n_sequences, manager.max_tracked_sequences),
            (result.BatchTokenLimitExceeded, "tokens", sum(lengths), manager.max_ragged_batch_size),
        )
        for exceeded, name, n, most in limits:
            if n > most:
                return exceeded, f"the batch needs {n} {name}, and {most} are the most"
        return SchedulingResult.Success, ""

    def _room(self, found: DSSequenceDescriptor | None, n_tokens: int, n_blocks: int) -> tuple[int, int]:
        sequence = PlaceholderSequenceDescriptor() if found is None else found
        seen = sequence.seen_tokens
        n_tokens = min(n_tokens, self._max_context - seen)
        in_blocks = (n_blocks + sequence.cur_allocated_blocks) * self._state.kv_block_size - seen
        n_tokens = max(min(n_tokens, in_blocks), 0)
        return n_tokens, self._state.cache.n_needed(seen, n_tokens)

    def _run(self, sequences: Sequence[DSSequenceDescriptor], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        try:
            return self._forward(self._state.cache, sequences, tokens)
        except MemoryError as error:
            raise SchedulingError(
                SchedulingResult.KVCacheLimitExceeded, str(error), fix="flush sequences that have ended"
            ) from error

    def _forward(
        self, cache: Any, sequences: Sequence[DSSequenceDescriptor], tokens: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        device, batch = self._host.device, self._batch
        cached = [each.cached for each in sequences]
        batch.clear()
        with cache.step(cached, tokens) as n_found, ExitStack() as context:
            for sequence, each, begin in zip(sequences, tokens, n_found, strict=True):
                batch.insert_sequence(sequence, each[begin:], do_checks=False)
            batch.finalize()
            cache.grow(cached, batch)
            last = batch.last_tokens.to(device)
            more = {"logits_to_keep": last} if self._keeps_last else {}
            if self._takes_positions:
                more["position_ids"] = batch.positions[None].to(device)
            if batch.current_tokens <= self._most_rows_on_one_thread:
                context.enter_context(one_torch_thread())
            for each in (torch.no_grad(), self._mode(), kv.attention.attention_in_blocks(self._attending)):
                context.enter_context(each)
            logits = self._host(
                input_ids=batch.input_ids()[None].to(device), past_key_values=cache, use_cache=True, **more
            ).logits[0]
        return logits if self._keeps_last else logits[last]

    def _try_out(self, takes: Iterable[str]) -> int:
        """Compares two short sequences in pieces, behind one another, with each alone. Returns the bytes that one block
        of keys and values takes in all layers.

        Raises FeatureError where the results differ, or where the model cannot run so.
        """
        family, where = type(self._module).__name__, "InferenceEngineV2"
        if missing := [name for name in ("input_ids", "past_key_values") if name not in takes]:
            raise FeatureError(
                f"the forward of {family} takes no {', '.join(missing)}: its tokens cannot lie behind one another",
                where=where,
                fix="use deepspeed_c.init_inference and generate",
            )
        sequences = self._draw_texts(_TRIED)
        try:
            found, cache = self._run_pieces(sequences, _PIECES)
            with torch.no_grad():
                alone = [self._host(input_ids=each[None].to(self._host.device)).logits[0, -1] for each in sequences]
        except (NeedsOwnCache, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            if isinstance(error, DeepSpeedCError) and not isinstance(error, NeedsOwnCache):
                raise
            raise FeatureError(
                f"the tokens of {family} cannot lie behind one another: {error}",
                where=where,
                fix="use deepspeed_c.init_inference and generate",
            ) from error
        expected = torch.stack(alone).float()
        off = float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not off < (1e-4 if found.dtype == torch.float32 else 0.05):
            raise FeatureError(
                f"two sequences of {family} in one forward differ from each alone by {off:.2g} of the largest logit",
                where=where,
                fix="use deepspeed_c.init_inference and generate",
            )
        keys = [each for layer in cache.layers for each in (layer.keys, layer.values)]
        return sum(each[0].numel() * each.itemsize for each in keys)

    def _draw_texts(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(0)
        return [torch.randint(0, self._words, (n,), generator=rng) for n in lengths]

    def _run_pieces(self, texts: Sequence[torch.Tensor], pieces: Sequence[slice]) -> tuple[torch.Tensor, Any]:
        """(logits of the last tokens, the cache) of new sequences, a forward for each piece of all of them."""
        cache = kv.ragged.RaggedCache(self._module.config, sum(blocks_of(len(text)) for text in texts))
        known = [DSSequenceDescriptor(uid, cache.open(), cache) for uid in range(len(texts))]
        for piece in pieces:
            logits = self._forward(cache, known, [text[piece] for text in texts])
        return logits, cache

    def _compare_bits(self) -> None:
        """Raises FeatureError where an operator of the model, or the bits of two sequences, depend on the company."""
        texts, family = self._draw_texts(_TRIED_BITS), type(self._module).__name__
        with require_row_wise(family):
            alone = [self._run_pieces([text], [slice(None)])[0] for text in texts]
        together, _ = self._run_pieces(texts, _PIECES)
        n_other = int((together != torch.cat(alone)).sum())
        if n_other:
            raise FeatureError(
                f"{n_other} of {together.numel()} logits of {family} have other bits alone than in one forward",
                where="deterministic",
                fix="set deterministic to false for this model",
            )

    def _n_blocks(self, block_bytes: int) -> int:
        """The blocks of each group, the same on all ranks.

        Raises StateError where there is no room for one sequence of one block.
        """
        memory, manager = self._config.state_manager.memory_config, self._config.state_manager
        if AllocationMode(memory.mode) is AllocationMode.ALLOCATE:
            return memory.size
        n_free = _free_bytes(memory.size)
        n_blocks = min(Collectives().gather_numbers(max(n_free // block_bytes, 0)))
        if n_blocks < 1:
            raise StateError(
                f"a block of keys and values takes {block_bytes} bytes, and {n_free} are left beside"
                f" memory_config.size ({memory.size})",
                where="state_manager.memory_config",
                fix="reserve less, or free memory",
            )
        return int(min(n_blocks, manager.max_tracked_sequences * blocks_of(self._max_context)))

    def _n_blocks_in(self, n_bytes: int, block_bytes: int) -> int:
        """The blocks of each group in so many bytes of each rank, the same on all ranks. Raises ConfigError."""
        manager, where = self._config.state_manager, "kv_cache_memory_bytes"
        comm = Collectives()
        n_free = int(min(comm.gather_numbers(_free_bytes())))
        if n_bytes > n_free:
            raise ConfigError(
                f"{n_bytes} bytes are asked for, and {n_free} are free for each rank",
                where=where,
                fix=f"write {n_free} or less, or free memory",
            )
        block_bytes = int(max(comm.gather_numbers(block_bytes)))
        n_blocks, n_least = n_bytes // block_bytes, max(blocks_of(self._max_context - 1), 1)  # the last has no keys
        if n_blocks < n_least:
            raise ConfigError(
                f"{n_bytes} bytes have room for {n_blocks * BLOCK_TOKENS} tokens, and one sequence has up to"
                f" {self._max_context}, with keys and values of {n_least * block_bytes} bytes",
                where=where,
                fix=f"write {n_least * block_bytes} or more, or make sequences shorter (max_context, --max-model-len)",
            )
        return min(n_blocks, manager.max_tracked_sequences * blocks_of(self._max_context))


def _free_bytes(reserved: int = 0) -> int:
    """Free bytes for each rank of this host, after some that stay free."""
    host = Accelerator("cpu")  # blocks of a model in host memory, also on a machine with an accelerator
    return (host.available_memory() - reserved) // host.device_count()
