"""Each function of DeepSpeed that asks a question, or reads a configuration, answers: none raises FeatureError."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.compat import probes
from deepspeed_c.compat.alias.upstream import upstream
from deepspeed_c.engine.getters import ConfigGetters
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.utils.runtime import has_inf_or_nan
from deepspeed_c.zero.layout import autocast
from ops.op_builder import AsyncIOBuilder
from tests import fresh
from tests.waits import ran

QUESTION = re.compile(
    r"(is|has|installed|can|should|supports|was|are|needs)_|.*_(enabled|available|supported|compatible)$"
)
# Modules whose functions `get_*` read a configuration.
READERS = {
    *("deepspeed.runtime.config", "deepspeed.compression.config", "deepspeed.runtime.data_pipeline.config"),
    *("deepspeed.runtime.swap_tensor.aio_config", "deepspeed.runtime.model_checkpointing.config"),
    *("deepspeed.autotuning.config", "deepspeed.runtime.torch_autocast"),
}
# Functions with such names that act on data or raise, and ask nothing.
NO_QUESTIONS = {
    ("mii.legacy.utils", "check_if_task_and_model_is_supported"),
    ("deepspeed.module_inject.auto_ep_layer", "apply_scores_before_experts_if_enabled"),
    ("deepspeed.runtime.torch_autocast", "autocast_if_enabled"),
}


def is_asked(module: str, name: str) -> bool:
    if (module, name) in NO_QUESTIONS:
        return False
    return bool(QUESTION.match(name)) or (module in READERS and name.startswith("get_"))


def questions() -> list[tuple[str, str]]:
    """The functions of that form, in the modules that define them."""
    return [
        (module, name)
        for module, names in sorted(upstream().modules.items())
        for name, entry in sorted(names.items())
        if entry.kind == "function" and entry.module == module and is_asked(module, name)
    ]


SWEEP = """
import importlib, json, sys
import deepspeed_c
deepspeed_c.install_as_deepspeed(force=True)
from deepspeed_c.compat.alias.unbuilt import Unbuilt
from deepspeed_c.errors import FeatureError
wrong = []
for module, name in json.loads(sys.argv[1]):
    function = getattr(importlib.import_module(module), name)
    if isinstance(function, Unbuilt):
        wrong.append(f"{module}.{name} is not built")
    try:
        function()
    except FeatureError as error:
        wrong.append(f"{module}.{name}: {error}")
    except Exception:
        pass  # it needs arguments
print(json.dumps(wrong))
"""


def test_every_question_has_an_answer() -> None:
    asked = questions()
    assert len(asked) > 150 and ("deepspeed.compile.util", "is_deepcompile_supported") in asked
    done = fresh.run(["-c", SWEEP, json.dumps(asked)], cwd=Path(__file__).resolve().parents[3])
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert wrong == [], "\n".join(wrong)


ANSWERS = """
import json
import deepspeed_c
deepspeed_c.install_as_deepspeed(force=True)
from deepspeed.comm import mori
from deepspeed.compile.util import is_deepcompile_supported
from deepspeed.compile.z3_eager_fallback import get_active_z3_eager_fallback
from deepspeed.compile.custom_ops.sp_dp_registry import is_setup
from deepspeed.elasticity import elasticity_enabled
from deepspeed.inference.v2.inference_utils import ActivationType, is_gated
from deepspeed.module_inject.tp_shard import get_num_kv_heads
from deepspeed.ops.op_builder.builder import OpBuilder, installed_cuda_version
from deepspeed.runtime.zenflow.engine import is_zenflow_update_boundary
print(json.dumps([
    mori.is_enabled(), is_deepcompile_supported(), get_active_z3_eager_fallback(), is_setup(), get_num_kv_heads(),
    elasticity_enabled(ds_config={}), elasticity_enabled({"elasticity": {"enabled": True}}),
    is_gated(ActivationType.GEGLU), is_gated(ActivationType.GELU), is_zenflow_update_boundary(engine=None),
    OpBuilder.installed_rocm_version(), OpBuilder.is_rocm_pytorch(), installed_cuda_version("op"),
]))
"""


def test_features_that_are_not_here_answer_no() -> None:
    done = fresh.run(["-c", ANSWERS], env={**os.environ, "CUDA_HOME": "/no/such/folder"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = [False, False, None, False, None, False, True, True, False, False, [0, 0], False, [0, 0]]
    assert found == expected, (found, expected)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_inf_and_nan_are_found_wherever_they_are(bad: float, dtype: torch.dtype) -> None:
    for shape, place in (((1,), 0), ((7, 13), 90), ((3, 5, 11), 82)):
        x = torch.linspace(-60000, 60000, torch.Size(shape).numel(), dtype=torch.float64).to(dtype).view(shape)
        assert has_inf_or_nan(x).item() == (not torch.isfinite(x).all()), x
        x.view(-1)[place] = bad
        assert has_inf_or_nan(x).item() is True, x
    assert has_inf_or_nan(torch.zeros(0, dtype=dtype)).item() is False
    indices = torch.tensor([[0, 2, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, bad, 2.0]).to(dtype), (5,))
    assert has_inf_or_nan(sparse).item() is True
    assert has_inf_or_nan(torch.sparse_coo_tensor(indices, torch.ones(3, dtype=dtype), (5,))).item() is False


def test_questions_about_data_are_computed() -> None:
    plain = nn.Parameter(torch.zeros(2))
    assert not probes.is_zero_param(plain) and not probes.is_zero_param(SimpleNamespace(ds_id=1))
    plain.ds_id = 1
    assert probes.is_zero_param(plain)
    assert [probes.is_even(n) for n in (-3, -2, 0, 1, 2**70)] == [False, True, True, False, True]
    assert [probes.is_builtin_type(v) for v in (1, [], None, plain, SimpleNamespace())] == [
        True, True, True, False, False,
    ]  # fmt: skip
    adam, sgd = FusedAdam([plain]), torch.optim.SGD([plain], lr=0.1)
    assert probes.is_zero_supported_optimizer(adam) and not probes.is_zero_supported_optimizer(sgd)
    kinds = [
        nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.Embedding(1, 1), nn.BatchNorm2d(1), nn.LayerNorm(1), nn.Conv1d(1, 1, 1),
    ]  # fmt: skip
    assert [probes.is_module_compressible(m) for m in kinds] == [True] * 4 + [False] * 2
    mpu = SimpleNamespace(RowParallelLinear=nn.LayerNorm, ColumnParallelLinear=nn.Conv1d)
    assert all(probes.is_module_compressible(m, mpu) for m in kinds)
    groups = SimpleNamespace(param_intra_node_group=1, param_inter_node_shard_group=None)
    assert not probes.has_hierarchical_all_gather_groups(groups)
    groups.param_inter_node_shard_group = 2
    assert probes.has_hierarchical_all_gather_groups(groups)
    orders = [([], 3, True), ([(3, False)], 9, True), ([(3, False), (5, True), (4, True)], 5, True)]
    orders += [([(3, False), (5, True), (4, True)], 4, False), ([(0, True), (1, True)], 0, True)]
    for order, graph, expected in orders:
        assert probes.should_release_reduce_buckets(order, graph) is expected, (order, graph)
    entry = {"checkpoint_format": "zero3_partitioned"}
    assert [probes.is_autoep_zero3_partitioned_entry(e) for e in (entry, {}, None)] == [True, False, False]


def test_questions_of_objects_are_answered() -> None:
    getters, samples = ConfigGetters(), torch.utils.data.TensorDataset(torch.zeros(3, 1))
    stream = torch.utils.data.ChainDataset([])
    assert [getters.is_map_style_dataset(each) for each in (samples, [1], stream, None)] == [True, True, False, False]
    assert [getters.is_iterable_style_dataset(each) for each in (samples, [1], stream, None)] == [
        False, False, True, False,
    ]  # fmt: skip
    assert get_accelerator().supports_nvtx_domain is False


def test_nodes_of_graphs() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (x, torch.float16))
    copy = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float64})
    moved = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float64, "device": "cpu"})
    assert [probes.is_cast_op(n) for n in (x, cast, copy, moved)] == [
        *((False, None), (True, torch.float16), (True, torch.float64), (False, None))
    ]
    assert not probes.is_comm_op(x) and not probes.is_release_node(cast) and not probes.is_profile_incomplete(graph)
    x.meta["comm"] = True
    assert probes.is_comm_op(x) and not probes.is_profile_incomplete(None)
    cast.meta["deepcompile_profile_incomplete"] = True
    assert probes.is_profile_incomplete(graph)


def test_the_machine(tmp_path, monkeypatch) -> None:
    size = os.statvfs("/dev/shm")
    number, unit = probes.get_shm_size()[0].split()
    scale = 1024 ** ("B", "KB", "MB", "GB", "TB").index(unit)
    assert abs(float(number) * scale / (size.f_frsize * size.f_blocks) - 1) < 0.01, (number, unit, size)
    assert probes.is_nfs_path(str(tmp_path / "not" / "there")) is ("nfs" in kind_of(tmp_path))
    assert not probes.is_nfs_path("/proc/self")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ASCEND_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    ask = (
        probes.get_world_rank_from_launcher, probes.get_local_rank_from_launcher, probes.get_world_size_from_launcher,
    )  # fmt: skip
    assert [each() for each in ask] == [0, 0, 1]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert [each() for each in ask] == [7, 0, 9]
    assert probes.installed_cann_path() is None and "does not exist" in probes.installed_cann_version()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "ascend_toolkit_install.info").write_text("package=x\nversion=8.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert probes.installed_cann_version() == "8.0"
    log = tmp_path / "stderr.log"
    assert "does not exist" in probes.was_interrupted(str(log))
    for text in ("fine\n", "Traceback\nKeyboardInterrupt\n"):
        log.write_text(text)
        assert probes.was_interrupted(str(log)) is ("Keyboard" in text)


def kind_of(folder: Path) -> str:
    """The kind of the file system, by the program df."""
    done = ran(["df", "-T", str(folder)], check=True)
    return done.stdout.splitlines()[1].split()[1]


@pytest.mark.parametrize(
    "text, capabilities",
    [
        ("release 11.0, V11", "6.0;6.1;7.0;8.0"),
        ("release 11.8, V11", "6.0;6.1;7.0;8.0;8.6;9.0"),
        ("release 12.1, V12", "6.0;6.1;7.0;8.0;8.6;9.0"),
        ("release 12.8, V12", "6.0;6.1;7.0;8.0;8.6;9.0;10.0;12.0"),
        ("nothing", "6.0;6.1;7.0"),
    ],
)
def test_the_compiler_of_cuda(text: str, capabilities: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {text}'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    version = re.search(r"(\d+)\.(\d+)", text)
    assert probes.installed_cuda_version() == ((int(version[1]), int(version[2])) if version else (0, 0))
    assert probes.get_default_compute_capabilities() == capabilities


def test_a_builder_finds_functions_of_libraries() -> None:
    builder = AsyncIOBuilder("any")
    assert builder.get_rocm_gpu_arch() == "" and builder.get_rocm_wavefront_size() == "32"  # of a torch without ROCm
    assert builder.has_function("cos", ("m",)) and builder.has_function("cos", ["no_such_library", "m"])
    assert not builder.has_function("no_such_function", ["m"]) and not builder.has_function("cos", ["no_such_library"])
    assert not builder.has_function("cos", [])


def test_dtypes_of_gradients_under_autocast() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    autocast.note_autocast(torch.bfloat16, [first])
    assert autocast.is_autocast_initialized() and autocast.get_autocast_dtype() is torch.bfloat16
    assert autocast.has_comm_dtype(first) and not autocast.has_comm_dtype(second)
    assert probes.get_norm_dtype() is torch.float64
    assert autocast.get_all_comm_dtypes([first, second]) == {torch.bfloat16, torch.float64}
