"""zero.Init: each rank gets its part of each parameter, the process is restored afterwards, and the model trains as if
it had been built without zero.Init."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import deepspeed_c
from deepspeed_c import errors
from deepspeed_c.utils import safe_get_full_fp32_param
from deepspeed_c.zero.weights import init as pp
from deepspeed_c.zero.weights.gather_unit import PlacedShard
from deepspeed_c.zero.weights.init import ZeroParamStatus
from deepspeed_c.zero.weights.param import state_of
from tests import fresh, training
from tests.deepspeed_c.zero.test_oracle import make_config
from tests.deepspeed_c.zero.traits import TRAITS, batch
from tests.ranks import free_port, on_ranks, run_ranks

WORLDS = [1, 2, 3]


class Odd(nn.Module):
    """Has sizes that nothing divides, a parameter without elements, a 0-dim parameter, a buffer, a tied weight, and a
    parameter with a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(13, 17)
        self.norm = nn.BatchNorm1d(5)
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 7))
        self.one = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(2, 2, 2), requires_grad=False)
        self.frozen._is_hf_initialized = True
        self.register_buffer("table", torch.arange(4.0))
        self.tied = nn.Linear(13, 17, bias=False)
        self.tied.weight = self.lin.weight


def plain_odd(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def whole(param: torch.Tensor) -> torch.Tensor:
    with deepspeed_c.zero.GatheredParameters(param):
        return param.detach().clone()


def raises(kind: type[BaseException], *words: str):
    """Like ``pytest.raises``, for rank processes, which do not import pytest. The message must contain all
    ``words``."""

    @contextlib.contextmanager
    def context():
        try:
            yield
        except kind as error:
            text = str(error)
            missing = [word for word in words if word not in text]
            assert not missing, f"{missing} not in: {text}"
        else:
            raise AssertionError(f"{kind.__name__} was not raised")

    return context()


# -- a rank's part -----------------------------------------------------------------------------------------------------


def shards_body(rank: int, world: int) -> list[tuple]:
    want = dict(plain_odd().named_parameters())
    torch.manual_seed(100 * rank)  # rank 0 has the seed of plain_odd()
    with deepspeed_c.zero.Init():
        model = Odd()
    assert model.tied.weight is model.lin.weight
    assert model.frozen._is_hf_initialized is True and not model.frozen.requires_grad
    assert torch.equal(model.table, torch.arange(4.0)) and type(model.table) is torch.Tensor
    ids, rows = set(), []
    for name, param in model.named_parameters():
        like = want[name]
        assert isinstance(param, nn.Parameter) and param.requires_grad == like.requires_grad, name
        assert param.ds_shape == like.shape and param.ds_numel == like.numel(), name
        assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE and param.ds_persist is False, name
        assert param.ds_tensor.numel() == param.partition_numel(), name
        assert param.ds_param_type is pp.ZeroParamType.PARTITIONED
        assert param.untyped_storage().nbytes() == 0, f"{name} takes memory while it is released"
        assert param.ds_tensor.untyped_storage().nbytes() == 4 * param.partition_numel(), f"{name} keeps more"
        summary = param.ds_summary()
        assert summary["numel"] == like.numel() and summary["status"] == "NOT_AVAILABLE", summary
        ids.add(param.ds_id)
        before = param
        param.all_gather()
        assert param.ds_status is ZeroParamStatus.AVAILABLE
        assert torch.equal(param.data, like), f"{name}: {param.data} is not rank 0's {like}"
        param.partition()
        assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE and dict(model.named_parameters())[name] is before
        param.all_gather()
        with torch.no_grad():
            param.mul_(2)
        param.partition(has_been_updated=True)
        assert torch.equal(whole(param), like * 2), name
        rows.append((name, param.ds_tensor.clone().tolist(), (like * 2).reshape(-1).tolist()))
    assert len(ids) == len(rows)
    model.lin.weight.all_gather([model.lin.weight, model.one, model.table])
    assert model.one.ds_status is ZeroParamStatus.AVAILABLE
    model.lin.weight.partition([model.lin.weight, model.one, model.table])
    assert model.one.ds_status is ZeroParamStatus.NOT_AVAILABLE
    return rows


@pytest.mark.parametrize("world", WORLDS)
def test_shards_are_even_exact_and_rank_0s(world: int) -> None:
    by_rank = run_ranks(world, shards_body)
    for rows in zip(*by_rank):
        name, want = rows[0][0], rows[0][2]
        sizes = [len(piece) for _, piece, _ in rows]
        assert sum(sizes) == len(want) and max(sizes) - min(sizes) <= 1, f"{name}: {sizes} of {len(want)}"
        joined = [x for _, piece, _ in rows for x in piece]
        assert joined == want, f"{name}: {joined} is not {want}"


# -- arguments ----------------------------------------------------------------------------------------------------------

AUTO = {
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "scheduler": {"params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
}


def dtype_body(rank: int, world: int) -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    cases = [
        ({}, torch.float32),
        ({"config_dict_or_path": AUTO}, torch.float32),
        ({"config_dict_or_path": {**AUTO, "bf16": {"enabled": True}}}, bf16),
        ({"config": {**AUTO, "bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}}, fp16),
        ({"param_dict": {"bf16": {"enabled": True}}}, bf16),
        ({"config": {"bf16.enabled": True}}, bf16),
        ({"config": {"bf16": {"enabled": True}}, "dtype": torch.float32}, torch.float32),
        ({"config": {"bf16": {"enabled": False}}, "dtype": fp16, "mem_efficient_linear": False}, fp16),
    ]
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    before = copy.deepcopy(config)
    with deepspeed_c.zero.Init(config_dict_or_path=config):
        pass
    assert config == before
    for kwargs, dtype in cases:
        with deepspeed_c.zero.Init(**kwargs):
            model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
            made = torch.ones(2)
            index = torch.arange(3)
            named = torch.zeros(2, dtype=torch.float64)
        assert model[0].weight.dtype is model[0].weight.ds_tensor.dtype is dtype, (kwargs, model[0].weight.dtype)
        assert model[1].running_mean.dtype is dtype and model[1].num_batches_tracked.dtype is torch.int64, kwargs
        assert made.dtype is dtype and index.dtype is torch.int64, kwargs
        # As in DeepSpeed, a requested dtype applies to all floating-point tensors that are made within.
        assert named.dtype is (dtype if kwargs.keys() - {"config_dict_or_path"} or dtype is bf16 else torch.float64)
        assert whole(model[0].weight).dtype is dtype


def overrides_body(rank: int, world: int) -> None:
    dtype, device = pp.DeepSpeedTensorOverride.dtype, pp.DeepSpeedTensorOverride.device
    for given, want in [([dtype, device], torch.float16), ([dtype], torch.float16), ([device], None), ([], None)]:
        with deepspeed_c.zero.Init(dtype=torch.float16, tensor_overrides=given) as init:
            made = torch.ones(2)
            layer = nn.Linear(3, 5)
        assert made.dtype is (want or torch.float32), given
        # Parameters always get the dtype, because they are sharded in it.
        assert layer.weight.ds_tensor.dtype is torch.float16, (given, layer.weight.ds_tensor.dtype)
        assert init.get_partition_rank() == rank and init.num_partitions == world
        for group in (init.get_dp_process_group(), init.get_partition_dp_group(layer.weight)):
            assert torch.distributed.get_process_group_ranks(group) == list(range(world))


@pytest.mark.parametrize("world", [1, 2])
def test_dtypes_and_buffers(world: int) -> None:
    run_ranks(world, dtype_body)
    run_ranks(world, overrides_body)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_contexts_nest_and_refuse(rank: int, world: int) -> None:
    with deepspeed_c.zero.Init(enabled=False, remote_device="nvme"):
        assert type(nn.Linear(3, 5).weight) is nn.Parameter and not hasattr(nn.Linear(3, 5).weight, "ds_id")
    with deepspeed_c.zero.Init(dtype=torch.bfloat16):
        with deepspeed_c.zero.Init(dtype=torch.float32), deepspeed_c.zero.Init(enabled=False):
            inner = nn.Linear(3, 5)
        outer = nn.Linear(3, 5)
        pp.shutdown_init_context()
        assert torch.ones(1).dtype is torch.float32
        plain = nn.Linear(3, 5)
        pp.restore_init_context()
        again = nn.Linear(3, 5)
        with torch.device("meta"):
            meta = nn.Linear(3, 5)
    assert inner.weight.ds_tensor.dtype is torch.float32
    assert outer.weight.ds_tensor.dtype is again.weight.ds_tensor.dtype is torch.bfloat16
    assert not hasattr(plain.weight, "ds_id") and plain.weight.dtype is torch.float32
    assert meta.weight.is_meta and not hasattr(meta.weight, "ds_id")
    pp.shutdown_init_context()
    pp.restore_init_context()
    pp.restore_init_context()  # a restore too many does nothing
    assert not hasattr(nn.Linear(3, 5).weight, "ds_id")
    first, second = deepspeed_c.zero.Init(), deepspeed_c.zero.Init()
    first.__enter__()
    second.__enter__()
    with raises(errors.StateError, "nest"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    for place in (None, "none", "cpu", "nvme"):
        with deepspeed_c.zero.Init(remote_device=place, pin_memory=True):
            assert nn.Linear(3, 5).weight.ds_tensor.device.type == "cpu"
    refused = [
        ({"param_swapper": object()}, errors.FeatureError), ({"zero_quantized_weights": True}, errors.FeatureError),
        ({"zero_quantized_nontrainable_weights": True}, errors.FeatureError),
        ({"remote_device": "disk"}, errors.ConfigError), ({"config": 3}, errors.ConfigError),
    ]  # fmt: skip
    for kwargs, kind in refused:
        with raises(kind):
            deepspeed_c.zero.Init(**kwargs)
    group = torch.distributed.new_group([rank], use_local_synchronization=True) if world > 1 else None
    try:
        if group is not None:
            with deepspeed_c.zero.Init(data_parallel_group=group):
                assert nn.Linear(3, 5).weight.partition_numel() == 15

            class Mpu:
                get_data_parallel_group = staticmethod(lambda: group)

            with deepspeed_c.zero.Init(mpu=Mpu()):
                assert nn.Linear(3, 5).weight.partition_numel() == 15
    finally:
        if group is not None:
            torch.distributed.destroy_process_group(group)


class Marked(nn.Parameter):
    """A parameter with an attribute. Copies keep class and attribute, as bitsandbytes' copies do."""

    mark = ""

    def __deepcopy__(self, memo: dict) -> Marked:
        copied = Marked(self.data.clone(), self.requires_grad)
        copied.mark = self.mark
        return copied


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_parameters_that_replace_empty_ones_are_sharded(rank: int, world: int) -> None:
    with deepspeed_c.zero.Init(dtype=torch.bfloat16):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5, bias=False), nn.Linear(3, 5))
        torch.manual_seed(rank)
        model[0].weight = nn.Parameter(torch.randn(5, 3))
        model[1].weight = model[0].weight
        marked = model[0].bias = Marked(torch.arange(5.0))
        marked.mark = "kept"
        assert model[0].weight.ds_tensor.numel() == model[0].weight.partition_numel() < 15 or world == 1
    torch.manual_seed(0)
    assert torch.equal(whole(model[1].weight), torch.randn(5, 3).bfloat16())
    assert model[1].weight is model[0].weight and model[0].bias is marked
    assert model[2].weight.is_meta and not hasattr(model[2].weight, "ds_id")
    model[2].weight = nn.Parameter(torch.zeros(5, 3))
    assert not hasattr(model[2].weight, "ds_id")
    copies = [copy.deepcopy(marked)]
    with deepspeed_c.zero.GatheredParameters(marked):
        copies.append(copy.deepcopy(model)[0].bias)
    for copied in copies:
        assert type(copied) is Marked and copied.mark == "kept" and copied.tolist() == list(range(5))
    assert marked.ds_status is ZeroParamStatus.NOT_AVAILABLE


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class HfLike(nn.Module):
    """Initialises all of its modules in one method, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.own = nn.Linear(3, 5), NoReset()
        self.own.weight._is_hf_initialized = True

    def _init_weights(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.fill_(3.0)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_module_given(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Odd()
    params = dict(model.named_parameters())
    deepspeed_c.zero.Init(module=model, dtype=torch.bfloat16)
    want = dict(plain_odd().named_parameters())
    for name, param in model.named_parameters():
        assert param is params[name] and torch.equal(whole(param), want[name].bfloat16()), name
    assert model.tied.weight is model.lin.weight and model.frozen._is_hf_initialized
    assert model.table.dtype is torch.float32
    deepspeed_c.zero.Init(module=model)  # a second call leaves sharded parameters as they are
    assert model.one.ds_tensor.dtype is torch.bfloat16

    # For modules on the meta device, reset_parameters of each module runs with rank 0's random numbers.
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(13, 7), nn.BatchNorm1d(7), nn.Linear(7, 13))
        model[2].weight.requires_grad_(False)
        model[0].bias.mark = "kept"
        model.append(nn.Linear(13, 7, bias=False))
        model[3].weight = model[0].weight
    torch.manual_seed(50 * rank)
    deepspeed_c.zero.Init(module=model)
    torch.manual_seed(0)
    like = nn.Sequential(nn.Linear(13, 7), nn.BatchNorm1d(7), nn.Linear(7, 13))
    for (name, param), expected in zip(model.named_parameters(), like.parameters()):
        assert torch.equal(whole(param), expected), name
    assert model[3].weight is model[0].weight and model[0].bias.mark == "kept" and not model[2].weight.requires_grad
    assert torch.equal(model[1].running_var, torch.ones(7)) and int(model[1].num_batches_tracked) == 0
    with torch.device("meta"):
        model = HfLike()
    deepspeed_c.zero.Init(module=model)
    assert torch.equal(whole(model.own.weight), torch.full((3,), 3.0)) and model.own.weight._is_hf_initialized
    assert torch.equal(whole(model.body.weight), torch.full((5, 3), 3.0))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), NoReset())
    with raises(errors.ModelError, "NoReset", "reset_parameters", "1:"):
        deepspeed_c.zero.Init(module=model)


# -- constructors ---------------------------------------------------------------------------------------------------------


class Halved(nn.Linear):
    """Edits its weights after the constructor of its base class."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        with torch.no_grad():
            self.weight /= 2
        self.bias.data.fill_(1.5)
        self.extra = nn.Parameter(self.weight.detach().clone())


class Editor(nn.Module):
    """Edits the weights of its children, which are already sharded, in the ways that published models use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(7, 11) for _ in range(4))
        self.halved = Halved()
        self.embed = nn.Embedding(11, 7, padding_idx=3)
        nn.init.kaiming_uniform_(self.a.weight)
        nn.init.zeros_(self.a.bias)
        nn.init.orthogonal_(self.b.weight)
        weight, bias = self.c.weight.data, self.c.bias.data  # two are held while others are edited
        self.d.weight.data.normal_(0, 0.02)
        weight.fill_(2.0)
        with torch.no_grad():
            self.d.bias[2] = 4.0
            self.embed.weight[1:3] *= 3
        bias.fill_(3.0)
        self.copy = nn.Parameter(self.d.weight.clone())
        self.b.bias.data = torch.full((11,), 7.0)
        self.embed.apply(lambda module: module.weight.data[5].zero_())
        assert tuple(self.d.weight.shape) == (11, 7) and self.d.weight.numel() == 77 and self.d.weight.dim() == 2
        assert self.halved.weight.std() > 0


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_constructors_may_edit_what_is_sharded_already(rank: int, world: int) -> None:
    torch.manual_seed(0)
    want = dict(Editor().named_parameters())
    torch.manual_seed(rank)
    with deepspeed_c.zero.Init() as context:
        model = Editor()
        whole_now = [n for n, p in model.named_parameters() if p.ds_status is ZeroParamStatus.AVAILABLE]
        # A worker thread of a collective may still hold the data of the last parameter here.
        assert len(whole_now) <= 1, f"{whole_now} stay whole although nobody holds their data"
        held = model.a.weight.data
        held.add_(float(rank + 1))
    assert not context.is_open
    for name, param in model.named_parameters():
        assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE, name
        expected = want[name] + 1 if name == "a.weight" else want[name]
        assert torch.equal(whole(param), expected), f"{name}: {whole(param)} is not {expected}"
    with raises(errors.StateError, "Linear.weight", "GatheredParameters"):
        nn.init.normal_(model.a.weight)
    with raises(errors.StateError, "shape"), deepspeed_c.zero.Init():
        model = nn.Linear(3, 5)
        model.weight.data = torch.zeros(2 + rank, 3)


# -- zero.Init restores the process ------------------------------------------------------------------------------------


def _world_of_names() -> dict[str, object]:
    classes = {f"{c.__module__}.{c.__qualname__}": c.__dict__.get("__init__") for c in pp._all_subclasses(nn.Module)}
    names = {name: getattr(torch, name) for name in pp._CONSTRUCTORS}
    return {**classes, **names, "subclass": nn.Module.__dict__.get("__init_subclass__"), "apply": nn.Module.apply}


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 5)
        self.lin.weight.data.zero_()
        raise ZeroDivisionError("on purpose")


def unpatch_body(rank: int, world: int) -> None:
    before = _world_of_names()
    assert pp._orig_torch_arange is torch.arange

    class Early(nn.Linear):
        pass  # inherits __init__, and must not get an __init__ of its own

    with deepspeed_c.zero.Init(dtype=torch.bfloat16):
        assert torch.arange is not pp._orig_torch_arange

        class Within(nn.Linear):
            def __init__(self, n):
                super().__init__(n, n)

        class Below(Within):
            def __init__(self):
                super().__init__(4)
                self.more = nn.Parameter(torch.ones(3))

        assert Early(3, 5).weight.ds_numel == 15
        assert Below().more.ds_numel == 3 and Below().weight.ds_numel == 16
        replaced = Within.__init__

        def mine(self, n):
            nn.Linear.__init__(self, n, n + 1)

        class Replaced(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)

        Replaced.__init__ = mine
        assert replaced is Within.__init__
    assert "__init__" not in Early.__dict__
    assert Replaced.__init__ is mine, "a replacement that the user made within the context is gone"
    assert Below().more.__class__ is nn.Parameter and not hasattr(Below(), "ds_id")
    for made in (Failing, lambda: 1 / 0):
        with raises(ZeroDivisionError), deepspeed_c.zero.Init(), deepspeed_c.zero.Init(dtype=torch.float16):
            made()
    after = _world_of_names()
    different = [name for name in before if after[name] is not before[name]]
    assert not different, f"changed for good: {different}"
    assert not hasattr(nn.Linear(3, 5).weight, "ds_id") and torch.ones(1).dtype is torch.float32
    # The user has replaced torch.empty: zero.Init puts the user's function back.
    original, theirs = torch.empty, lambda *args, **kwargs: pp._orig_torch_empty(*args, **kwargs)
    torch.empty = theirs
    try:
        with deepspeed_c.zero.Init(dtype=torch.bfloat16), deepspeed_c.zero.Init(dtype=torch.float16):
            assert torch.empty(1).dtype is torch.float16
        assert torch.empty is theirs
    finally:
        torch.empty = original


def test_everything_is_as_before_afterwards() -> None:
    run_ranks(1, unpatch_body)
    run_ranks(2, unpatch_body)


@on_ranks(1)
def test_names_that_transformers_replaces(rank: int, world: int) -> None:
    """Replace DeepSpeed's wrapper of tensor constructors, as prevent_arange_dtype_change of transformers does."""
    seen = []
    original = pp.zero_wrapper_for_fp_tensor_constructor

    def wrapper(fn, *args, **kwargs):
        if fn is pp._orig_torch_arange:
            seen.append(kwargs["target_device"])
            return lambda *a, **k: pp._orig_torch_arange(*a, **{"device": kwargs["target_device"], **k})
        return original(fn, *args, **kwargs)

    pp.zero_wrapper_for_fp_tensor_constructor = wrapper
    try:
        with deepspeed_c.zero.Init(dtype=torch.bfloat16):
            assert torch.arange(3.0).dtype is torch.float32 and torch.ones(3).dtype is torch.bfloat16
    finally:
        pp.zero_wrapper_for_fp_tensor_constructor = original
    assert len(seen) == 1 and pp._orig_torch_arange is torch.arange
    assert pp.get_accelerator().device_name(os.environ["LOCAL_RANK"])
    assert pp.get_accelerator().current_device_name()


# -- reading released parameters ---------------------------------------------------------------------------------------


def _refusals(model: nn.Module, param: nn.Parameter) -> list:
    return [
        lambda: param.data,
        lambda: param.clone(),
        lambda: param.detach().clone(),
        lambda: param.detach().numpy(),
        lambda: param.numpy(),
        lambda: param.tolist(),
        lambda: param.float().norm(),
        lambda: param.sum(),
        lambda: param.cpu() + 1,
        lambda: param + 1,
        lambda: param[0],
        lambda: param.copy_(torch.zeros(5, 3)),
        lambda: param.normal_(),
        lambda: nn.init.zeros_(param),
        *(
            (lambda: copy.deepcopy(param), lambda: copy.deepcopy(model))
            if isinstance(state_of(param), PlacedShard)
            else ()
        ),
        lambda: pickle.dumps(param),
        lambda: torch.save(param, io.BytesIO()),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(model.state_dict()),
        lambda: {k: v.cpu() for k, v in model.state_dict().items()},
        lambda: setattr(param, "data", torch.zeros(5, 3)),
        model.half if hasattr(param, "_dsc_handle") else lambda: param.data,
    ]


def _check_refusals(model: nn.Module, param: nn.Parameter, name: str) -> None:
    for i, refusal in enumerate(_refusals(model, param)):
        try:
            with torch.no_grad():
                got = refusal()
        except errors.StateError as error:
            assert name in str(error) and "GatheredParameters" in str(error), (i, error)
        else:
            raise AssertionError(f"number {i} gave {got!r}")
    assert name in repr(param) and param.ds_status is ZeroParamStatus.NOT_AVAILABLE


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_touching_a_released_parameter_says_what_to_do(rank: int, world: int) -> None:
    torch.manual_seed(0)
    with deepspeed_c.zero.Init():
        model = nn.Sequential(nn.Linear(3, 5))
    param = model[0].weight
    expected = whole(param)
    _check_refusals(model, param, "Linear.weight")
    # A deep copy is collective and whole: peft copies modules to train them beside the original.
    twin = copy.deepcopy(model)
    assert type(twin[0].weight) is nn.Parameter and torch.equal(twin[0].weight, expected)
    # Methods that need no data still work.
    assert param.shape == param.size() == (5, 3) and param.numel() == param.nelement() == 15 and len(param.size()) == 2
    assert (
        param.dim() == param.ndim == param.ndimension() == 2
        and param.size(-1) == 3
        and param.dtype is torch.float32
        and param.device.type == "cpu"
        and param.is_leaf
    )
    assert list(model.state_dict()) == ["0.weight", "0.bias"] and param.new_zeros(2).tolist() == [0, 0]
    assert param.is_floating_point() and param.element_size() == 4 and param.grad is None
    for harmless in (model.cpu, model.float, lambda: model.to("cpu"), lambda: model.to(torch.float32), model.eval):
        harmless()
    assert model[0].weight is param and torch.equal(whole(param), expected)
    model.half()
    assert param.dtype is param.ds_tensor.dtype is torch.float16 and param.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert torch.equal(whole(param), expected.half())
    with deepspeed_c.zero.GatheredParameters(param):
        copied = copy.deepcopy(model[0].weight)
        loaded = pickle.loads(pickle.dumps(param))
        state = io.BytesIO()
        torch.save({"w": param.detach()}, state)
    assert type(copied) is type(loaded) is nn.Parameter and torch.equal(copied, loaded)
    assert torch.equal(copied, expected.half()) and not hasattr(copied, "ds_id")
    state.seek(0)
    assert torch.equal(torch.load(state, weights_only=True)["w"], expected.half())


@on_ranks(2)
def test_touching_a_parameter_that_an_engine_released(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    engine = deepspeed_c.initialize(model=model, config=make_config(3, "fp32", 1, {}))[0]
    with engine:
        param = model[0].weight
        expected = whole(param)
        _check_refusals(model, param, "0.weight")
        model.cpu()
        model.to("cpu", torch.float32)
        engine.to("cpu")
        assert model[0].weight is param and torch.equal(whole(param), expected)
        assert param.numel() == param.ds_numel == 15
        training.update(engine, engine(torch.ones(1, 3)).sum())
        assert not torch.equal(whole(param), expected)


# -- training -----------------------------------------------------------------------------------------------------------


def _train(engine, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    with engine:
        for step in range(3):
            losses.append(training.step(engine, *batch(step, 0, rank, 0)))
        return losses, {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}


def training_body(rank: int, world: int, trait: str, stage: int) -> None:
    config = make_config(stage, "fp32", 1, {"zero_optimization": {"reduce_bucket_size": 60}})
    torch.manual_seed(rank)
    plain = TRAITS[trait].model()
    want, weights = _train(deepspeed_c.initialize(model=plain, config=config)[0], rank)
    torch.manual_seed(rank)
    with deepspeed_c.zero.Init(config_dict_or_path=config):
        model = TRAITS[trait].model()
    before = dict(model.named_parameters())
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    assert all(param is before[name] for name, param in model.named_parameters())
    if stage < 3:
        assert all(state_of(p) is None and p.numel() == p.data.numel() for p in model.parameters())
    got, trained = _train(engine, rank)
    assert got == want, f"{got} is not {want}"
    for name, value in weights.items():
        assert torch.equal(trained[name], value), name


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("trait", ["plain", "tied", "frozen", "zero_size"])
def test_training_is_that_of_a_model_built_plainly(trait: str, world: int) -> None:
    for stage in (3, 2):
        run_ranks(world, training_body, trait, stage)


def muon_body(rank: int, world: int) -> list[list[bool]]:
    config = make_config(3, "fp32", 1, {})
    config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01}}
    with deepspeed_c.zero.Init(config_dict_or_path=config):
        model = TRAITS["plain"].model()
    engine = deepspeed_c.initialize(model=model, config=config)[0]
    with engine:
        return [[g["use_muon"] for g in engine.optimizer.param_groups]]


def test_matrices_are_found_by_their_whole_shape() -> None:
    for rank, kinds in enumerate(run_ranks(2, muon_body)):
        assert kinds == [[True, False]], f"rank {rank}: {kinds}"


# -- torch.distributed ----------------------------------------------------------------------------------------------------

SCRIPT = """
    import torch, deepspeed_c
    import torch.distributed as dist
    assert not dist.is_initialized()
    with deepspeed_c.zero.Init():
        model = torch.nn.Linear(13, 7)
    print("RESULT", dist.get_rank(), dist.get_world_size(), model.weight.partition_numel(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def _said(rank: int | None, world: int, port: int) -> str:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in names}
    env.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_PORT=str(port))
    if rank is not None:
        env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    done = fresh.run(["-c", textwrap.dedent(SCRIPT)], env=env)
    return done.stdout + done.stderr


def test_starts_torch_distributed_itself() -> None:
    """Runs with the environment of two ranks, and without any. The latter is one process, with a warning that sharding
    saves nothing."""
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        alone, *pair = pool.map(_said, (None, 0, 1), (1, 2, 2), (free_port(), port, port))
    assert "RESULT 0 1 91" in alone and "zero.Init shards over one rank" in alone, alone
    for rank, output in enumerate(pair):
        assert f"RESULT {rank} 2 {(46, 45)[rank]}" in output and "one rank" not in output, output
