"""Models with torchao's layers and weights at every ZeRO stage, compared with one process of plain torch.

The plain process sees the same micro-batches one after the other, because scales of activations belong to a micro-batch.
"""

import copy
import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deepspeed_c
from deepspeed_c.errors import CheckpointError, FeatureError, MissingPackageError, ModelError, StateError
from deepspeed_c.plan.sizes import sizes_of
from deepspeed_c.zero import GatheredParameters
from deepspeed_c.zero.weights.param import state_of
from tests.ranks import on_ranks

torchao = pytest.importorskip("torchao")
quantization = pytest.importorskip("torchao.quantization")

WIDTH, BATCH, STEPS = 32, 12, 3
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}
# The model itself, but for the adapters, is frozen in the first table and trained in the second.
FROZEN = ("int8", "int8 of activations too", "intx", "float8", "nf4")
TRAINED = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "qat")
OFFLOAD = {
    "offload": {"offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "cpu"}},
}
ONLY_AT_3 = ("MiCS", *OFFLOAD)
SAVED = ("float8", "rowwise", "qat")


class Block(torch.nn.Module):
    """A layer and an adapter beside it."""

    def __init__(self, width, recomputes):
        super().__init__()
        self.base = torch.nn.Linear(width, width, bias=False)
        self.down, self.up = torch.nn.Linear(width, 16, bias=False), torch.nn.Linear(16, width, bias=False)
        self.recomputes = recomputes

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputes else self.run(x)

    def run(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def make(kind, dtype=torch.float32, recomputes=False):
    torch.manual_seed(3)
    # A layer with codes of activations passes no gradient on. It is the only layer, and the first.
    n_blocks = 1 if kind == "int8 of activations too" else 2
    blocks = [Block(WIDTH, recomputes) for _ in range(n_blocks)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 16)).to(dtype)
    convert(model, kind)
    return model


def is_base(module, name):
    return name.endswith("base")


def convert(model, kind):
    if kind in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=is_base)
    elif kind == "nf4":
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        for block in model[:-1]:
            block.base.weight = torch.nn.Parameter(to_nf4(block.base.weight.data, 64, 4), requires_grad=False)
    else:
        quantization.quantize_(model, config_of(kind), filter_fn=is_base)


def config_of(kind):
    if kind == "qat":
        from torchao.quantization.qat import QATConfig

        base = quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(16)
        )
        return QATConfig(base, step="prepare")
    return {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8 of activations too": quantization.Int8DynamicActivationInt8WeightConfig,
        "intx": quantization.IntxWeightOnlyConfig,
        "float8": quantization.Float8WeightOnlyConfig,
    }[kind]()


def loss_of(model, x):
    return model(x).float().square().mean()


def batch_of(step, dtype):
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def plain(kind, ranks, n=1, *, trait=""):
    """The losses of one process in place of ranks[i] ranks, with n micro-batches each, in step i."""
    dtype = torch.bfloat16 if trait == "bf16" else torch.float32
    model = make(kind, dtype)
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, **ADAM)
    losses = []
    for step, world in enumerate(ranks):
        losses.append(0.0)
        optimizer.zero_grad(set_to_none=False)
        for of_rank in batch_of(step, dtype).chunk(world):
            for x in of_rank.chunk(n):
                loss = loss_of(model, x) / n
                loss.backward()
                losses[-1] += loss.item() / world
            for p, master in zip(params, masters):
                master.grad += p.grad.float() / world
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters):
                p.copy_(master)
    return losses


def engine_of(model, world, stage, trait="", **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    if trait == "MiCS":
        zero["mics_shard_size"] = 1
    elif trait:
        zero |= OFFLOAD.get(trait, {})
    n = 2 if trait == "accumulation" else 1
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world // n,
        "gradient_accumulation_steps": n,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "zero_optimization": zero,
        "bf16": {"enabled": trait == "bf16"},
        **more,
    }
    return deepspeed_c.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, steps):
    losses = []
    n = engine.gradient_accumulation_steps()
    dtype = next(p.dtype for p in engine.module.parameters() if p.requires_grad)
    for step in steps:
        total = 0.0
        # Chunk i * n + j is micro-batch j of rank i.
        for x in batch_of(step, dtype).chunk(engine.world_size * n)[engine.global_rank * n :][:n]:
            loss = loss_of(engine, x)
            engine.backward(loss)
            engine.step()
            total += loss.item() / n
        total = torch.tensor(total, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        losses.append(total.item() / engine.world_size)
    return losses


def check_cells(rank, world, kind, traits, folder=""):
    for trait in traits:
        expected = plain(kind, [world] * STEPS, 2 if trait == "accumulation" else 1, trait=trait)
        for stage in [3] if trait in ONLY_AT_3 else range(4):
            dtype = torch.bfloat16 if trait == "bf16" else torch.float32
            model = make(kind, dtype, recomputes=trait == "checkpointing")
            more = {"zero": {"offload_param": {"device": "nvme", "nvme_path": folder}}} if trait == "nvme" else {}
            with engine_of(model, world, stage, trait, **more) as engine:
                found = train(engine, range(STEPS))
                if stage == 3 and trait != "MiCS":
                    assert all(state_of(p) is not None for p in engine.module.parameters())
            # One bit of a sum's order may move a weight of 4 bits to the next level.
            close = 2e-2 if trait == "bf16" or kind == "qat" else 1e-5
            assert found[0] == pytest.approx(expected[0], rel=min(close, 1e-3)), (trait, stage)
            assert found == pytest.approx(expected, rel=close), (trait, stage)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", FROZEN)
@on_ranks()
def test_frozen_codes_train_adapters_as_one_process_does(rank, world, kind, tmp_path):
    traits = ("", "bf16", "accumulation", "checkpointing", *ONLY_AT_3) if world == 2 else ("",)
    check_cells(rank, world, kind, traits, share(str(tmp_path)))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", TRAINED)
@on_ranks()
def test_layers_with_plain_weights_train_as_in_one_process(rank, world, kind):
    check_cells(rank, world, kind, ("", "bf16", "accumulation") if world == 2 else ("",))


@on_ranks(2)
def save_on_two(rank, world, folder):
    for kind in SAVED:
        for stage in (1, 3):
            with engine_of(make(kind), world, stage) as engine:
                train(engine, range(STEPS))
                engine.save_checkpoint(f"{folder}/{kind}{stage}")


@on_ranks()
def resume(rank, world, folder):
    for kind in SAVED:
        expected = plain(kind, [2] * STEPS + [world] * 2)[STEPS:]
        for saved_at, stage in ((1, 3), (3, 3)) if world == 3 else ((3, 0),):
            model = make(kind)
            for base in bases(model):  # the load replaces these codes
                spoil(base)
            with engine_of(model, world, stage) as engine:
                engine.load_checkpoint(f"{folder}/{kind}{saved_at}")
                found = train(engine, range(STEPS, STEPS + 2))
            assert found == pytest.approx(expected, rel=2e-2 if kind == "qat" else 1e-5), (kind, saved_at, stage)


def bases(model):
    return [module for name, module in model.named_modules() if name.endswith("base")]


def spoil(base):
    inner = [getattr(base.weight, name) for name in base.weight.__tensor_flatten__()[0]] if is_wrapper(base) else []
    with torch.no_grad():
        for tensor in inner or [base.weight]:
            tensor.zero_()


def is_wrapper(base):
    return hasattr(base.weight, "__tensor_flatten__")


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    save_on_two(folder=str(tmp_path))
    for world in (1, 3):
        resume(folder=str(tmp_path), world=world)


@on_ranks(2)
def test_a_checkpoint_of_other_codes_is_refused(rank, world, tmp_path):
    folder = share(str(tmp_path))
    with engine_of(make("int8"), world, 3) as engine:
        engine.save_checkpoint(folder)
    for stage in (0, 3):
        with (
            engine_of(make("float8"), world, stage) as engine,
            pytest.raises(StateError, match="does not fit: .*Float8Tensor"),
        ):
            engine.load_checkpoint(folder)


def int4_tensor():
    from torchao.quantization import Int4Tensor

    codes = torch.arange(32 * 16).remainder(251).to(torch.int8).view(32, 16)
    return Int4Tensor(codes, torch.rand(2, 32), torch.rand(2, 32), [1, 16], torch.Size([32, 32]))


@on_ranks(3)
def test_a_wrapper_is_made_again_byte_for_byte(rank, world):
    for kind in (*FROZEN, "int4"):
        for stage in (0, 3):
            model = make("int8" if kind == "int4" else kind)
            if kind == "int4":  # its products need a CUDA device, its bytes do not
                model[0].base.weight = torch.nn.Parameter(int4_tensor(), requires_grad=False)
            weight = model[0].base.weight
            names, context = weight.__tensor_flatten__()
            expected = {name: getattr(weight, name).clone() for name in names}
            engine = engine_of(model, world, stage)
            with GatheredParameters(list(model[0].base.parameters())):
                again = copy.deepcopy(model[0].base).weight if stage == 0 else model[0].base.weight
                assert type(again) is type(weight) and again.__tensor_flatten__()[1] == context
                assert again.dtype == weight.dtype and again.stride() == weight.stride()
                for name, tensor in expected.items():
                    found = getattr(again, name)
                    assert found.dtype == tensor.dtype and found.stride() == tensor.stride(), (kind, name)
                    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
                        kind,
                        name,
                    )
            engine.close()
            if stage == 3:
                with pytest.raises(StateError, match="0.base.weight_.* is sharded over 3 ranks"):
                    model[0].base.weight  # noqa: B018


@on_ranks(3)
def test_a_rank_holds_a_third_of_the_codes(rank, world):
    model = make("int8")
    codes = sum(p.numel() for p in model.parameters() if is_wrapper_tensor(p))
    with engine_of(model, world, 3) as engine:
        held = [p for p in engine.module.parameters() if p.dtype == torch.uint8]
        assert all(state_of(p).piece.nbytes <= p.ds_numel for p in held)
        assert sum(state_of(p).piece.nbytes for p in held) < 0.45 * codes
        engine.offload_states()
        engine.reload_states()
        train(engine, [0])


@on_ranks(2)
def test_codes_stay_frozen_when_other_weights_are_chosen(rank, world):
    for stage in (0, 3):
        with engine_of(make("int8"), world, stage) as engine:
            before = train(engine, [0, 0])
            for names in (["*"], ["0.base.weight_Int8Tensor_scale"]):
                with pytest.raises(ModelError, match="0.base.weight_Int8Tensor_.* has codes.*\n.*adapters"):
                    engine.set_trainable(names)
            engine.set_trainable(["*.up.weight"])
            assert train(engine, [0])[0] < before[1] < before[0]


@on_ranks(2)
def test_the_module_of_a_closed_engine_has_its_wrappers_again(rank, world):
    model = make("int8")
    model[1].base.weight = model[0].base.weight  # tied
    state, x = list(model.state_dict()), batch_of(0, torch.float32)
    before = model(x)
    with engine_of(model, world, 2) as engine:
        assert not any(is_wrapper_tensor(p) for p in engine.module.parameters())
        assert len(list(engine.module.parameters())) == len({id(p) for p in engine.module.parameters()}) == 9
        torch.testing.assert_close(engine(x), before, rtol=0, atol=0)
    assert list(model.state_dict()) == state and type(model[0].base) is torch.nn.Linear
    assert model[1].base.weight is model[0].base.weight
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    # Sharded bytes stay sharded: another engine takes them over.
    engine_of(model, world, 3).close()
    with engine_of(model, world, 0) as engine:
        torch.testing.assert_close(engine(x), before, rtol=0, atol=0)


def is_wrapper_tensor(tensor):
    return hasattr(type(tensor), "__tensor_flatten__")


@on_ranks(2)
def test_a_caller_s_optimizer_and_the_planner_know_the_weights(rank, world, tmp_path):
    model = make("float8")
    planned = sizes_of(model, [[p for p in model.parameters() if p.requires_grad]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # of frozen weights too
    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 2}}
    engine = deepspeed_c.initialize(model=model, optimizer=optimizer, config=config)[0]
    laid_out = [(name, p.numel(), p.dtype) for name, p in engine.module.named_parameters()]
    assert sorted((p.name, p.numel, p.dtype) for p in planned.params) == sorted(laid_out, key=lambda row: row[0])
    for save in (engine.save_16bit_model, engine.save_model):
        with pytest.raises(CheckpointError, match="0.base.weight is torchao's Float8Tensor.*\n.*save_checkpoint"):
            save(str(tmp_path))
    folder = share(str(tmp_path))
    engine.save_16bit_model(folder, "adapters.pt", exclude_frozen_parameters=True)
    if rank == 0:
        assert not any("base" in name for name in torch.load(f"{folder}/adapters.pt"))
    engine.close()


def share(value):
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


@on_ranks(2)
def test_adapters_of_peft_train_beside_codes(rank, world):
    peft = pytest.importorskip("peft")
    for stage in (0, 3):
        models = []
        for _ in range(2):
            model = make("int8")
            model.requires_grad_(False)
            torch.manual_seed(5)
            models.append(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["base"])))
        optimizer = torch.optim.AdamW([p for p in models[1].parameters() if p.requires_grad], **ADAM)
        with engine_of(models[0], world, stage) as engine:
            for step in range(STEPS):
                loss = loss_of(models[1], batch_of(step, torch.float32))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert train(engine, [step]) == pytest.approx([loss.item()], rel=1e-5), stage


@on_ranks(2)
def test_inference_runs_codes(rank, world):
    model, x = make("int8"), batch_of(0, torch.float32)
    before = model(x)
    engine = deepspeed_c.init_inference(model, dtype=torch.float32)
    torch.testing.assert_close(engine(x), before, rtol=0, atol=0)
    engine.close()
    with pytest.raises(FeatureError, match="0.base.weight: .*Int8Tensor.*tensor parallelism"):
        deepspeed_c.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": 2})


class Unknown(torch.Tensor):
    """A wrapper class of an unknown library."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


def with_weight(weight, requires_grad=False):
    model = make("int8")
    model[0].base.weight = torch.nn.Parameter(weight, requires_grad=requires_grad)
    return model


def converted_twice():
    from torchao.float8 import convert_to_float8_training

    model = make("int8")
    convert_to_float8_training(model, module_filter_fn=is_base)
    return model


def trained_codes():
    model = make("int8")
    model[0].base.weight.requires_grad_()
    return model


@on_ranks(1)
def test_bad_input_is_refused_before_anything_moves(rank, world):
    fp16 = {"fp16": {"enabled": True}}
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    bf16 = {"trait": "bf16"}
    cases = [
        (
            lambda: with_weight(Unknown(torch.rand(32, 32))),
            {},
            ModelError,
            "test_torchao.Unknown.*unknown.*\n.*Int8Tensor",
        ),
        (trained_codes, {}, ModelError, "Int8Tensor.*no gradient.*\n.*requires_grad_"),
        (lambda: make("float8"), bf16, ModelError, "Float8Tensor of torch.float32.*\n.*before quantize_"),
        (lambda: make("tensorwise"), fp16, ModelError, "Float8Linear.*loss scale.*\n.*bf16"),
        (lambda: make("rowwise"), autocast, ModelError, "Float8Linear.*loss scale.*\n.*bf16"),
        (
            converted_twice,
            {},
            ModelError,
            "converted twice: to torchao's Float8Linear, .* torchao's Int8Tensor.*\n.*filter",
        ),
        (
            lambda: make("int8"),
            {"tensor_parallel": {"replace_with_kernel_inject": True}},
            FeatureError,
            "Int8Tensor, and replace_with_kernel_inject needs plain",
        ),
    ]
    for make_model, more, error, text in cases:
        for stage in (0, 3):
            model = make_model()
            kept = dict(model.named_parameters())
            with pytest.raises(error, match=text) as raised:
                engine_of(model, world, stage, **copy.deepcopy(more))
            assert str(raised.value).startswith("0.base"), raised.value
            assert all(kept[name] is p for name, p in model.named_parameters())


@on_ranks(1)
def test_a_torchao_that_is_too_old_is_refused(rank, world):
    for kind in ("int8", "rowwise"):
        model = make(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torchao, "__version__", "0.9.0+cpu")
            with pytest.raises(MissingPackageError, match="0.base.*torchao 0.9.0.*0.18.*\n.*pip install"):
                engine_of(model, world, 0)


@on_ranks(1)
def test_a_layer_of_bitsandbytes_is_not_converted_again(rank, world):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make("int8")
    layer = bitsandbytes.nn.Linear8bitLt(32, 32, bias=False, has_fp16_weights=False)
    layer.weight = model[0].base.weight
    model[0].base = layer
    with pytest.raises(ModelError, match="converted twice: to bitsandbytes's Linear8bitLt, .* torchao's Int8Tensor"):
        engine_of(model, world, 0)
