"""Frozen bases of bitsandbytes under trained adapters: losses are those of a plain process at every stage, and codes
stay byte for byte what they were."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c import zero
from deepspeed_c.errors import MissingPackageError, ModelError, StateError
from tests import training
from tests.ranks import on_ranks, run_ranks

bnb = pytest.importorskip("bitsandbytes")

# (rows, columns): codes of uint8 [4096, 1], 40 blocks, blocks that are not full.
SHAPES = [(64, 128), (40, 64), (12, 40), (7, 12), (128, 7)]
KINDS = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4 twice": {"quant_type": "nf4", "compress_statistics": True},
    "nf4 as bf16": {"quant_type": "nf4", "quant_storage": torch.bfloat16},
    "fp4": {"quant_type": "fp4", "compress_statistics": True},
    "int8": None,
}
LIBRARY = "bitsandbytes"
N_ROWS, N_STEPS, LR = 12, 3, 1e-2


def base_of(kind: str, rows: int, columns: int, bias: bool) -> nn.Module:
    if kind == "int8":
        return bnb.nn.Linear8bitLt(columns, rows, bias=bias, has_fp16_weights=False)
    return bnb.nn.Linear4bit(columns, rows, bias=bias, **KINDS[kind])


class Layer(nn.Module):
    """A frozen base with an adapter. The bias of the base is trained."""

    def __init__(self, kind: str, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.base = base_of(kind, rows, columns, bias)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    """Layers of hard sizes. The output has the size of the input."""

    def __init__(self, kind: str, *, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, *shape, bias=i % 2 == 1) for i, shape in enumerate(SHAPES))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def net(kind: str, seed: int = 0, **more: Any) -> Net:
    torch.manual_seed(seed)
    return Net(kind, **more).to("cpu")


def rows_of(step: int, rank: int, world: int) -> torch.Tensor:
    n = N_ROWS // world
    x = torch.randn(N_ROWS, SHAPES[0][1], generator=torch.Generator().manual_seed(100 + step))
    return x[rank * n : (rank + 1) * n]


def plain(kind: str, dtype: torch.dtype, steps: int = N_STEPS) -> list[float]:
    """Losses of one process, with fp32 masters."""
    # The library rounds inputs of 8-bit layers in eval mode, and repacks 4-bit codes.
    model = net(kind).train(kind != "int8")
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().clone() for p in trained]
    for p in trained:
        p.data = p.data.to(dtype)
    optimizer, losses = torch.optim.AdamW(masters, lr=LR, weight_decay=0.0), []
    for step in range(steps):
        loss = model(rows_of(step, 0, 1).to(dtype)).float().pow(2).mean()
        loss.backward()
        for p, master in zip(trained, masters):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(trained, masters):
                p.copy_(master)
        losses.append(loss.item())
    return losses


def config(stage: int, world: int, **more: Any) -> dict[str, Any]:
    accumulate = more.pop("accumulate", 1)
    zero_section = {"stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    rows = N_ROWS // world // accumulate
    return training.config(
        stage, "AdamW", lr=LR, rows=rows, accumulate=accumulate, zero=zero_section, gradient_clipping=0.0, **more
    )


def codes_of(model: nn.Module) -> dict[str, bytes]:
    """The bytes of all codes and of what lies beside them."""
    found = {}
    with zero.GatheredParameters(model.parameters()):
        for name, value in model.state_dict(keep_vars=True).items():
            if ".base.weight" in name or name.endswith("SCB"):
                data = value.detach().contiguous().reshape(-1)
                found[name] = bytes(data.view(torch.uint8).numpy())
    return found


def run(engine: Any, rank: int, world: int, steps: range, accumulate: int = 1) -> list[float]:
    """Losses of an engine, the means of all ranks."""
    losses, dtype = [], engine.module.layers[0].up.weight.dtype
    for step in steps:
        total = torch.zeros(())
        for x in rows_of(step, rank, world).chunk(accumulate):
            loss = engine(x.to(dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulate / world
        torch.distributed.all_reduce(total)
        losses.append(total.item())
    return losses


def check(got: list[float], want: list[float], dtype: torch.dtype, label: str) -> None:
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert all(abs(a - b) <= close * abs(b) for a, b in zip(got, want, strict=True)), f"{label}: {got}, want {want}"


def cells(stage: int, world: int, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, sections of the configuration) of the cells of one stage."""
    yield "fp32", {}
    yield "bf16", {"bf16": {"enabled": True}}
    yield "fp16", {"fp16": {"enabled": True, "initial_scale_power": 8}}
    yield "accumulation", {"accumulate": 2}
    yield "recomputed", {}
    if stage == 3:
        nvme = {"device": "nvme", "nvme_path": folder}
        yield "weights in host memory", {"zero": {"offload_param": {"device": "cpu"}}}
        yield "weights in a file", {"zero": {"offload_param": nvme, "offload_optimizer": {"device": "cpu"}}}
        yield "mics", {"zero": {"mics_shard_size": 1 if world == 3 else world}}


def cells_body(rank: int, world: int, kind: str, folder: str) -> None:
    wants = {dtype: plain(kind, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    codes = codes_of(net(kind))
    for stage in range(4):
        for name, sections in cells(stage, world, folder):
            label = f"{kind} stage {stage} {name}, {world} ranks"
            accumulate = sections.get("accumulate", 1)
            # All ranks take rank 0's base. The library repacks codes in eval mode.
            model = net(kind, seed=rank, recomputes=name == "recomputed").eval()
            with training.engine_of(model, config(stage, world, **sections)) as engine:
                dtype = model.layers[0].up.weight.dtype
                losses = []
                for step in range(N_STEPS):
                    with torch.no_grad():
                        before = engine(rows_of(9, 0, 1).to(dtype))
                    losses += run(engine, rank, world, range(step, step + 1), accumulate)
                assert before.isfinite().all(), label
                check(losses, wants[dtype], dtype, label)
                assert codes_of(model) == codes, f"{label}: codes differ"
            assert codes_of(model) == codes, f"{label}: codes differ after the end"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_cells_equal_one_process(world: int, kind: str, tmp_path: Any) -> None:
    run_ranks(world, cells_body, kind, str(tmp_path), preload=LIBRARY)


RESUMED = [(stage, kind) for stage in (0, 3) for kind in ("nf4 twice", "fp4", "int8")]


def saving_body(rank: int, world: int, folder: str) -> None:
    for stage, kind in RESUMED:
        with training.engine_of(net(kind).train(kind != "int8"), config(stage, world)) as engine:
            run(engine, rank, world, range(2))
            engine.save_checkpoint(folder, tag=f"{stage} {kind}")


def resuming_body(rank: int, world: int, folder: str) -> None:
    for stage, kind in RESUMED:
        want, codes = plain(kind, torch.float32, 4)[2:], codes_of(net(kind))
        other = (stage + 1) % 4 if stage != 3 else 3
        model = net(kind, seed=5).train(kind != "int8")
        with training.engine_of(model, config(other, world)) as engine:
            engine.load_checkpoint(folder, tag=f"{stage} {kind}")
            label = f"{kind} from stage {stage} to {other}, {world} ranks"
            assert codes_of(model) == codes, f"{label}: codes differ"
            check(run(engine, rank, world, range(2, 4)), want, torch.float32, label)


def test_other_ranks_resume(tmp_path: Any) -> None:
    run_ranks(2, saving_body, str(tmp_path), preload=LIBRARY)
    for world in (1, 3):
        run_ranks(world, resuming_body, str(tmp_path), preload=LIBRARY)


def refusal(act: Any, kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


@on_ranks(2, preload=LIBRARY)
def test_codes_of_another_kind_are_refused(rank: int, world: int, tmp_path: Any) -> None:
    for stage in (0, 3):
        with training.engine_of(net("nf4 twice"), config(stage, world)) as engine:
            engine.save_checkpoint(str(tmp_path))
            state = engine.module_state_dict()
        for kind in ("fp4", "nf4"):
            with training.engine_of(net(kind), config(stage, world)) as engine:
                said = refusal(lambda: engine.load_checkpoint(str(tmp_path), load_module_strict=False), StateError)
                assert "layers.0.base was saved as nf4" in said, said
                said = refusal(partial(engine.load_module_state_dict, state, strict=False), StateError)
                assert "layers.0.base was saved as nf4" in said, said


@on_ranks(2, preload=LIBRARY)
def test_whole_weights(rank: int, world: int, tmp_path: Any) -> None:
    for stage in (1, 3):
        for kind in KINDS:
            label, model, other = f"{kind} stage {stage}", net(kind), net(kind, seed=5)
            codes, want = codes_of(model), model.state_dict()
            x = rows_of(0, 0, 1)
            with training.engine_of(model, config(stage, world)) as engine:
                engine.save_16bit_model(str(tmp_path), "whole.bin")
                engine.save_16bit_model(str(tmp_path), "adapters.bin", exclude_frozen_parameters=True)
                state = engine.module_state_dict()
                assert state.keys() == want.keys(), label
            whole = torch.load(os.path.join(tmp_path, "whole.bin"))
            for i, (rows, columns) in enumerate(SHAPES):
                weight = whole[f"layers.{i}.base.weight"].float()
                # A one in each place of the input reads the base, whose own product rounds 8-bit inputs in eval mode.
                base = net(kind).train().layers[i].base
                read = base(torch.eye(columns)).t() - (0 if base.bias is None else base.bias[:, None])
                assert weight.shape == (rows, columns), label
                assert torch.allclose(weight, read, atol=2e-3), f"{label}: {(weight - read).abs().max()}"
            adapters = torch.load(os.path.join(tmp_path, "adapters.bin"))
            trained = {name for name, p in net(kind).named_parameters() if p.requires_grad}
            assert adapters.keys() == trained, f"{label}: {sorted(adapters.keys() ^ trained)}"
            with training.engine_of(other, config(stage, world)) as engine:
                engine.load_module_state_dict(state)
                assert codes_of(other) == codes, label
                got = engine(x)
                with training.engine_of(net(kind), config(0, world)) as plain_engine:
                    assert torch.equal(got, plain_engine(x)), label
            torch.distributed.barrier()


@on_ranks(2, preload=LIBRARY)
def test_casts_leave_codes(rank: int, world: int) -> None:
    codes = codes_of(net("nf4 as bf16"))
    model = net("nf4 as bf16")
    with training.engine_of(model, config(1, world)) as engine:
        engine.half()
        assert model.layers[0].base.weight.dtype is torch.bfloat16
        assert codes_of(model) == codes
    served = deepspeed_c.init_inference(net("nf4 as bf16"), dtype=torch.float16)
    assert codes_of(served.module) == codes
    assert served(rows_of(0, 0, 1).half()).isfinite().all()
    for kind in ("nf4 as bf16", "int8"):
        sharded = net(kind, seed=rank)
        zero.Init(module=sharded, dtype=torch.float16)
        assert codes_of(sharded) == codes_of(net(kind)), kind


def bytes_of_codes() -> int:
    """The bytes of all codes that Python's objects hold."""
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.dtype in (torch.uint8, torch.int8):
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


@on_ranks(2, preload=LIBRARY)
def test_a_forward_keeps_no_gathered_codes(rank: int, world: int) -> None:
    for kind, whole in (("nf4", 256 * 128), ("int8", 256 * 256)):
        model = nn.Sequential(*(Layer(kind, 256, 256, bias=False) for _ in range(8))).to("cpu")
        limits = {"stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 1}
        before = bytes_of_codes() - 8 * whole
        with training.engine_of(model, config(3, world, zero=limits)) as engine:
            loss = engine(torch.ones(2, 256)).pow(2).mean()
            kept = bytes_of_codes() - before
            assert kept <= 4 * whole + 2 * whole, f"{kind}: {kept} bytes, {kept / whole} layers of 8"
            engine.backward(loss)
            engine.step()


@on_ranks(1, preload=LIBRARY)
def test_bad_layers(rank: int, world: int) -> None:
    def start(change: Any, **sections: Any) -> str:
        model = net("nf4")
        layer = change(model) or model
        error = sections.pop("error", ModelError)
        return refusal(lambda: training.engine_of(layer, config(2, 1, **sections)), error)

    def trained(model: Net) -> None:
        model.layers[1].base.weight = bnb.nn.Params4bit(torch.ones(64, 40), requires_grad=True)

    def repacked(model: Net) -> None:
        model.layers[1].base.weight.quant_state.packing_format_for_cpu = True

    def replaced(model: Net) -> None:
        model.layers[1].base.forward = lambda x: x

    for change, word in ((trained, "gradients"), (repacked, "repacked"), (replaced, "forward of its own")):
        said = start(change)
        assert "layers.1.base" in said and word in said and "Fix:" in said, said
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bnb, "__version__", "0.43.1")
        said = start(lambda model: None, error=MissingPackageError)
        assert "0.43.1 is too old" in said and "0.50.2 is tested" in said, said


@on_ranks(2, preload=LIBRARY)
def test_a_cut_is_refused(rank: int, world: int) -> None:
    cut = {**config(1, 1), "tensor_parallel": {"autotp_size": 2}}
    said = refusal(lambda: training.engine_of(net("nf4"), cut))
    assert "layers.0.base" in said and "blocks" in said, said
