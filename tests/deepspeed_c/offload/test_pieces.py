"""A parameter that is larger than one swap goes through a step piece by piece. Every bit equals a step with the whole
parameter in memory, and only a few pieces are in memory at once."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import OffloadError, StateError
from deepspeed_c.offload import file as file_home
from deepspeed_c.offload import place
from deepspeed_c.offload.swap import Swapper
from deepspeed_c.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_c.zero.states.home import Tagged
from tests.deepspeed_c.offload.test_swap import make, new_tensor, open_file
from tests.ranks import run_ranks
from tests.toys import Chain, mean_square

PIECE_ELEMS = 4096
STEPS = 3
N_IN, N_OUT = 211, 300

# Cell -> (stage, settings, whether device memory and host memory differ).
CELLS = {
    "bf16": (2, {"bf16": {"enabled": True}}, False),
    "fp32, masters are the weights": (3, {}, False),
    "bf16 apart": (1, {"bf16": {"enabled": True}}, True),
    "fp32 apart": (3, {}, True),
    "int8": (2, {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "state_dtype": "int8"}}}, True),
    "bf16 states": (3, {"optimizer": {"type": "Lion", "params": {"lr": 0.01, "state_dtype": "bf16"}}}, False),
    "in turn": (
        2,
        {"zero_optimization": {"offload_optimizer": {"pipeline_read": False, "pipeline_write": False}}},
        True,
    ),
    "weights too": (3, {"zero_optimization": {"offload_param": {"device": "nvme", "max_in_cpu": 0}}}, False),
    "LAMB looks at all of it": (2, {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, False),
}
Tensors = dict[str, torch.Tensor]


def make_engine(folder: str, stage: int, settings: dict) -> deepspeed_c.DeepSpeedEngine:
    torch.manual_seed(0)
    zero = {"stage": stage, "reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 0}
    nvme = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, "gradient_clipping": 0.5,
        "aio": {"checksum": True, "block_size": 4096}, **settings,
    }  # fmt: skip
    given = settings.get("zero_optimization", {})
    zero["offload_optimizer"] = {**nvme, **given.get("offload_optimizer", {})}
    if "offload_param" in given:
        zero["offload_param"] = {**given["offload_param"], "nvme_path": folder}
    config["zero_optimization"] = zero
    layers = {
        "first": torch.nn.Linear(5, N_IN),
        "large": torch.nn.Linear(N_IN, N_OUT),
        "last": torch.nn.Linear(N_OUT, 3),
    }
    model = Chain(torch.tanh, lambda y: mean_square(y.float()), **layers)
    return deepspeed_c.initialize(model=model, config=config)[0]


def one_step(engine: deepspeed_c.DeepSpeedEngine, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
    x = torch.randn(4, 5, generator=generator).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x))
    engine.step()


def bits(engine: deepspeed_c.DeepSpeedEngine) -> Tensors:
    found: Tensors = {}
    for name, param in engine.module.named_parameters():
        found[f"{name} master"] = safe_get_full_fp32_param(param)
        with deepspeed_c.zero.GatheredParameters(param):
            found[f"{name} weight"] = param.detach().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            try:
                found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
            except StateError:
                continue
    return found


def train(folder: str, cell: str, piece_elems: int) -> tuple[list[Tensors], int, int]:
    """Returns (the tensors after each step, the number of pieces that were streamed, the largest number of bytes in
    buffers)."""
    stage, settings, is_apart = CELLS[cell]
    n_pieces = 0
    stream = Swapper.stream

    def counting(self, tensors):
        nonlocal n_pieces
        for pieces in stream(self, tensors):
            n_pieces += 1
            yield pieces

    with (
        mock.patch.object(place, "is_apart", lambda device: is_apart),
        mock.patch.object(file_home, "SWAP_ELEMS", piece_elems),
        mock.patch.object(Swapper, "stream", counting),
        make_engine(folder, stage, settings) as engine,
    ):
        held, found = engine._optimizer.units[0].states.store.buffer_bytes, []
        for step in range(STEPS):
            one_step(engine, step)
            held = max(held, engine._optimizer.units[0].states.store.buffer_bytes)
            found.append(bits(engine) if step == STEPS - 1 or "LAMB" in cell else {})
        return found, n_pieces, held


def compare(rank: int, world: int, folder: str) -> dict[str, tuple[int, int, int]]:
    result = {}
    for cell in CELLS:
        want, n_whole, held_whole = train(folder, cell, 1 << 30)
        got, n_pieces, held = train(folder, cell, PIECE_ELEMS)
        assert n_whole == 0
        for step, (a, b) in enumerate(zip(got, want)):
            assert a.keys() == b.keys()
            for name in a:
                where = f"{cell}, step {step}, rank {rank}: {name}"
                assert torch.equal(a[name], b[name]), f"{where}\n  got  {a[name]}\n  want {b[name]}"
        result[cell] = n_pieces, held, held_whole
    return result


@pytest.mark.parametrize("world", [1, 2])
def test_every_bit_is_that_of_a_whole_bucket(world: int, tmp_path) -> None:
    for found in run_ranks(world, compare, str(tmp_path)):
        for cell, (n_pieces, held, held_whole) in found.items():
            print(f"{cell}: {n_pieces} pieces, {held} bytes in buffers, {held_whole} with whole buckets")
            n_expected = 0 if "LAMB" in cell else STEPS * -(-N_IN * N_OUT // world // PIECE_ELEMS)
            assert n_expected <= n_pieces <= n_expected + 2 * STEPS, (cell, n_pieces, n_expected)


def flip(rank: int, world: int, folder: str) -> str:
    """A byte of the file changes between two steps. The step that streams this byte names the damaged tensor."""
    with (
        mock.patch.object(file_home, "SWAP_ELEMS", PIECE_ELEMS),
        make_engine(folder, 2, {"bf16": {"enabled": True}}) as engine,
    ):
        one_step(engine, 0)
        store = engine._optimizer.units[0].states.store
        extent = max(store._extents.values(), key=lambda extent: extent.n_bytes)
        with open(open_file(folder), "r+b", buffering=0) as file:
            file.seek(extent.offset + 5 * extent.piece_bytes + 17)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x10]))
        with pytest.raises(OffloadError) as error:
            one_step(engine, 1)
        # Transfers in flight are finished and all buffers are free. The engine then needs a checkpoint to go on.
        with pytest.raises(StateError, match="failed in its middle"):
            engine.step()
        return str(error.value)


def test_a_flipped_byte_is_told(tmp_path) -> None:
    (message,) = run_ranks(1, flip, str(tmp_path))
    assert "large.weight" in message and "are not those that were written" in message, message


def peak_of_buffers(rank: int, world: int, folder: str) -> tuple[int, int]:
    held = []
    for piece_elems in (1 << 30, PIECE_ELEMS):
        with (
            mock.patch.object(file_home, "SWAP_ELEMS", piece_elems),
            make_engine(folder, 2, {"bf16": {"enabled": True}}) as engine,
        ):
            for step in range(STEPS):
                one_step(engine, step)
            held.append(engine._optimizer.units[0].states.store.buffer_bytes)
    return held[0], held[1]


def test_only_some_pieces_are_in_memory(tmp_path) -> None:
    ((whole, in_pieces),) = run_ranks(1, peak_of_buffers, str(tmp_path))
    # One group of pieces is in use, one is on its way in, and two on their way out. A group has masters and two moments
    # in fp32. 1500 is for the small buckets.
    limit = 4 * 3 * 4 * (PIECE_ELEMS + 1500)
    assert in_pieces <= limit < 3 * 4 * N_IN * N_OUT <= whole, (
        f"{in_pieces} bytes in pieces, {whole} as a whole, {limit} expected at most"
    )


def test_pieces_of_hard_sizes(tmp_path) -> None:
    """Streams are compared with tensors in memory, for pieces of one element, pieces a little larger than a page, and a
    short last piece."""
    for n, piece, checksum in itertools.product((1, 2, 1023, 4099, 65537), (1, 700, 4097), (False, True)):
        if n // piece > 1100:
            continue
        store = make(tmp_path, 0, checksum=checksum)
        tensors = [new_tensor(n, dtype, 3) for dtype in (torch.float32, torch.uint8)]
        truth = [tensor.clone() for tensor in tensors]
        tagged = [Tagged(tensor, f"{i}", piece) for i, tensor in enumerate(tensors)]
        store.send(tagged)
        for _ in range(2):
            begin = 0
            for pieces in store.stream(tagged):
                for part, whole in zip(pieces, truth):
                    assert torch.equal(part, whole[begin : begin + piece]), (n, piece, begin)
                    part.add_(1)
                    whole[begin : begin + piece].add_(1)
                begin += piece
            assert begin >= n
        assert all(store.is_away(tensor) for tensor in tensors)
        store.bring(tagged)
        for tensor, whole in zip(tensors, truth):
            assert torch.equal(tensor, whole), (n, piece, checksum)
        store.close()
