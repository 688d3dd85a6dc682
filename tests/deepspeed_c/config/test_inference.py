"""The configuration of ``init_inference``: keys, old names and defaults as in DeepSpeed 0.19.6, one object from several
sources, and errors that name the key and the fix.

If DSC_PEER_PYTHON names a Python that has DeepSpeed, DeepSpeed's class reads the same cases.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.compat.config_sections import DeepSpeedZeroConfig
from deepspeed_c.compat.dtype_enum import DtypeEnum
from deepspeed_c.config.inference import (
    DeepSpeedInferenceConfig,
    DeepSpeedMoEConfig,
    DeepSpeedTPConfig,
    MoETypeEnum,
    QuantTypeEnum,
    default_inference_config,
    dtype_of,
    load_inference_config,
)
from deepspeed_c.errors import ConfigError, DeepSpeedCError, FeatureError, UnsupportedConfigError
from tests import fresh
from tests.waits import ran

PEER = os.environ.get("DSC_PEER_PYTHON", "")

OURS = {"cpu_products": "auto"}

# DeepSpeed's defaults, without ``zero``.
DEFAULTS: dict[str, Any] = {
    "replace_with_kernel_inject": False, "dtype": "torch.float16",
    "tensor_parallel": {"enabled": True, "tp_size": 1, "tp_grain_size": 64, "mpu": None, "tp_group": None},
    "enable_cuda_graph": False, "use_triton": False, "triton_autotune": False, "triangular_masking": True,
    "moe": {
        "enabled": True, "ep_size": 1, "moe_experts": [1], "type": "standard", "ep_mp_group": None, "ep_group": None,
    },
    "keep_module_on_host": False,
    "quant": {
        "enabled": True, "activation": {"enabled": True, "num_bits": 8, "q_type": "symmetric", "q_groups": 1},
        "weight": {
            "enabled": True, "num_bits": 8, "q_type": "symmetric", "q_groups": 1, "quantized_initialization": {},
            "post_init_quant": {},
        },
        "qkv": {"enabled": True},
    },
    "checkpoint": None, "base_dir": "", "set_empty_params": False, "save_mp_checkpoint_path": None,
    "checkpoint_config": {"checkpoint_dir": None, "save_mp_checkpoint_path": None, "base_dir": None},
    "return_tuple": True, "training_mp_size": 1, "replace_method": "auto", "injection_policy": None,
    "injection_policy_tuple": None, "config": None, "max_out_tokens": 1024, "min_out_tokens": 1,
    "transposed_mode": False, "mp_size": 1, "mpu": None, "ep_size": 1, "ep_group": None, "ep_mp_group": None,
    "moe_experts": [1], "moe_type": "standard",
}  # fmt: skip

# (keys, paths whose values change from the defaults). "-": an old key that is no attribute once it was given.
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"kernel_inject": True}, {"replace_with_kernel_inject": True}),
    ({"replace_with_kernel_inject": "yes"}, {"replace_with_kernel_inject": True}),
    *(({"dtype": name}, {"dtype": "torch.float16"}) for name in ("fp16", "half", "float16", "torch.float16")),
    *(({"dtype": name}, {"dtype": "torch.float32"}) for name in ("fp32", "float", "float32", "torch.float32")),
    *(({"dtype": name}, {"dtype": "torch.bfloat16"}) for name in ("bf16", "bfloat", "bfloat16", "torch.bfloat16")),
    *(({"dtype": name}, {"dtype": "torch.int8"}) for name in ("int8", "torch.int8")),
    ({"dtype": "auto"}, {}),
    ({"tp": {"tp_size": 4}}, {"tensor_parallel.tp_size": 4}),
    (
        {"tensor_parallel": {"tp_size": "3", "tp_grain_size": 8}},
        {"tensor_parallel.tp_size": 3, "tensor_parallel.tp_grain_size": 8},
    ),
    ({"mp_size": 2}, {"tensor_parallel.tp_size": 2, "mp_size": "-"}),
    (
        {"mp_size": "2", "tp": {"tp_grain_size": 1}},
        {"tensor_parallel.tp_size": 2, "tensor_parallel.tp_grain_size": 1, "mp_size": "-"},
    ),
    ({"mpu": "x"}, {"tensor_parallel.mpu": "x", "mpu": "-"}),
    ({"enable_cuda_graph": 1}, {"enable_cuda_graph": True}),
    ({"triton_autotune": True}, {"triton_autotune": True}),
    ({"tm": False}, {"triangular_masking": False}),
    ({"moe": True}, {}),
    ({"moe": False}, {"moe.enabled": False}),
    ({"moe": {"num_experts": [4, 8], "type": "residual"}}, {"moe.moe_experts": [4, 8], "moe.type": "residual"}),
    (
        {"moe_experts": [2], "moe_type": "residual"},
        {"moe.moe_experts": [2], "moe.type": "residual", "moe_experts": "-", "moe_type": "-"},
    ),
    (
        {"expert_group": "g", "expert_mp_group": "m"},
        {"moe.ep_group": "g", "moe.ep_mp_group": "m", "ep_group": "-", "ep_mp_group": "-"},
    ),
    ({"ep_group": "g"}, {"moe.ep_group": "g", "ep_group": "-"}),
    ({"quant": {"weight": {"num_bits": 4, "q_groups": 8}}}, {"quant.weight.num_bits": 4, "quant.weight.q_groups": 8}),
    ({"quant": {"enabled": False, "qkv": {"enabled": False}}}, {"quant.enabled": False, "quant.qkv.enabled": False}),
    ({"quant": {"activation": {"q_type": "asymmetric"}}}, {"quant.activation.q_type": "asymmetric"}),
    ({"checkpoint": "a.json", "base_dir": "/d"}, {"checkpoint": "a.json", "base_dir": "/d"}),
    ({"checkpoint": {"type": "ds_model", "checkpoints": []}}, {"checkpoint": {"type": "ds_model", "checkpoints": []}}),
    (
        {"save_mp_checkpoint_path": "/s", "set_empty_params": True},
        {"save_mp_checkpoint_path": "/s", "set_empty_params": True},
    ),
    ({"return_tuple": False, "training_mp_size": 2}, {"return_tuple": False, "training_mp_size": 2}),
    ({"replace_method": "auto"}, {}),
    ({"injection_dict": {"Block": ["a.b"]}}, {"injection_policy": {"Block": ["a.b"]}}),
    ({"injection_policy_tuple": ["a", "b"]}, {"injection_policy_tuple": ["a", "b"]}),
    ({"args": {"seed": 1}}, {"config": {"seed": 1}}),
    ({"max_tokens": 7, "min_tokens": 7}, {"max_out_tokens": 7, "min_out_tokens": 7}),
    ({"max_out_tokens": 2.0, "min_out_tokens": "2"}, {"max_out_tokens": 2, "min_out_tokens": 2}),
    ({"transposed_mode": True, "keep_module_on_host": True}, {"transposed_mode": True, "keep_module_on_host": True}),
]

# Keys that both packages refuse, and keys that DeepSpeed alone accepts.
REFUSED: list[dict[str, Any]] = [
    *({"dtype": name} for name in ("fp17", "", "int4", None, 16, ["fp16"])),
    *({"foo": 1}, {"tensor_parallel": {"foo": 1}}, {"quant": {"weight": {"bits": 4}}}),
    *({"tp": {"tp_size": "two"}}, {"tp": [2]}, {"mp_size": 1.5}, {"max_tokens": "many"}),
    *({"quant": [True, 8]}, {"quant": 8}, {"moe": "standard"}, {"moe": {"type": "odd"}}),
    *({"checkpoint": ["a"]}, {"base_dir": None}, {"injection_policy": ["a"]}, {"args": "x"}),
    *({"mp_size": 2, "tp": {"tp_size": 4}}, {"kernel_inject": True, "replace_with_kernel_inject": False}),
    *({"moe_experts": 4}, {"moe": {"num_experts": 4}}, {"quant": {"activation": {"q_type": "odd"}}}),
]
REFUSED_HERE: list[dict[str, Any]] = [
    *({"mp_size": 0}, {"mp_size": -1}, {"tp": {"tp_size": 0}}, {"tp": {"tp_grain_size": 0}}),
    *({"max_out_tokens": 0}, {"max_tokens": -1}, {"min_tokens": -1}, {"max_out_tokens": 5, "min_out_tokens": 6}),
    *({"training_mp_size": 0}, {"tp": {"enabled": False, "tp_size": 2}}, {"quant": {"weight": {"num_bits": 0}}}),
    *({"moe": {"ep_size": 2}}, {"ep_size": 2}, {"ep_size": 2, "moe": True, "moe_experts": [4]}),
    {"injection_policy": {"Block": 3}},
    {"checkpoint_config": {"base_dir": "/a"}, "base_dir": "/b"},
]

SCRIPT = """
import json, sys
from deepspeed.inference.config import DeepSpeedInferenceConfig as Config
def outcome(case):
    try:
        found = Config(**case).model_dump(mode="json")
    except (ValueError, TypeError, AssertionError):
        return "error"
    found.pop("zero")
    return {key: value for key, value in found.items() if key not in OURS}
print("CASES " + json.dumps([outcome(case) for case in json.load(sys.stdin)]))
"""


def expected(changes: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(DEFAULTS)
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            place = place[section]
        if value == "-":
            del place[name]
        else:
            place[name] = value
    return tree


def dumped(config: DeepSpeedInferenceConfig) -> dict[str, Any]:
    found = json.loads(config.model_dump_json())
    found.pop("zero")
    return {key: value for key, value in found.items() if key not in OURS}


@pytest.mark.parametrize("case", READ, ids=lambda case: str(case[0]))
def test_each_key_is_read_as_in_deepspeed(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    given, changes = case
    before = copy.deepcopy(given)
    for found in (
        DeepSpeedInferenceConfig(**given),
        load_inference_config(given, {}),
        load_inference_config(None, given),
    ):
        assert dumped(found) == expected(changes)
    assert given == before


@pytest.mark.parametrize("given", [*REFUSED, *REFUSED_HERE], ids=str)
def test_bad_input_is_refused_by_every_way_in(given: dict[str, Any]) -> None:
    for make in (lambda: DeepSpeedInferenceConfig(**given), lambda: load_inference_config(given, {})):
        with pytest.raises((ConfigError, FeatureError)) as caught:
            make()
        assert caught.value.where and caught.value.fix, repr(caught.value)


@pytest.mark.skipif(not PEER, reason="DSC_PEER_PYTHON names no Python that has DeepSpeed")
def test_deepspeed_reads_the_same_cases() -> None:
    cases = [given for given, _ in READ] + REFUSED + REFUSED_HERE
    done = ran([PEER, "-c", SCRIPT], input=json.dumps(cases))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("CASES ")]
    theirs = json.loads(line.removeprefix("CASES "))
    for (given, changes), found in zip(READ, theirs):
        assert found == expected(changes), given
    for given, found in zip(REFUSED, theirs[len(READ) :]):
        assert found == "error", given
    for given, found in zip(REFUSED_HERE, theirs[len(READ) + len(REFUSED) :]):
        assert found != "error", f"DeepSpeed refuses {given}: move it to REFUSED"


def test_defaults_are_a_dictionary_that_can_be_changed_and_passed_on() -> None:
    found = deepspeed_c.default_inference_config()
    assert {key: value for key, value in found.items() if key != "zero"} == DEFAULTS | OURS and found["zero"] == {}
    json.dumps(found)
    found["tensor_parallel"]["tp_size"], found["dtype"] = 2, "bf16"
    read = load_inference_config(found, {})
    assert (read.tensor_parallel.tp_size, read.dtype, read.notes) == (2, torch.bfloat16, [])
    assert default_inference_config()["tensor_parallel"]["tp_size"] == 1
    found["mp_size"] = 4
    with pytest.raises(ConfigError, match=r"mp_size and tensor_parallel.tp_size are both given"):
        load_inference_config(found, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_every_form_of_a_dtype(dtype: torch.dtype) -> None:
    member = next(member for member in DtypeEnum if member.value[0] is dtype)
    for form in (dtype, member, str(dtype), str(dtype).upper(), *member.value[1:]):
        assert load_inference_config({"dtype": form}, {}).dtype is dtype, form
        assert dtype_of(form) is dtype
    assert DtypeEnum.from_str(member.value[-1]) is member


@pytest.mark.parametrize(
    "value", ["fp8", torch.float64, torch.int32, torch.complex64, None, 16, DtypeEnum, QuantTypeEnum.sym]
)
def test_an_unknown_dtype_names_those_that_there_are(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"dtype: is .*\nFix: write torch.float16, .* or torch.int8"):
        load_inference_config({"dtype": value}, {})


def test_sections_as_objects_are_copied() -> None:
    tp, moe = DeepSpeedTPConfig(tp_grain_size=8), DeepSpeedMoEConfig(type=MoETypeEnum.residual)
    read = load_inference_config({"tp": tp, "moe": moe, "mp_size": 2}, {})
    assert (read.tensor_parallel.tp_size, read.tensor_parallel.tp_grain_size, read.moe.type) == (2, 8, "residual")
    assert (tp.tp_size, tp.model_fields_set) == (1, {"tp_grain_size"})
    assert load_inference_config({"tp": 3}, {"tensor_parallel": {"tp_size": 3}}).tensor_parallel.tp_size == 3
    assert load_inference_config({"tp": None, "moe": None, "zero": None}, {}) == DeepSpeedInferenceConfig()
    with pytest.raises(ConfigError, match=r"tensor_parallel \(given as tp\): true is not an object"):
        load_inference_config({"tp": True}, {})
    with pytest.raises(ConfigError, match=r"tensor_parallel .given as tp.: the key 1 is not a string"):
        load_inference_config({"tp": {1: 2}}, {})


def test_an_object_as_configuration_and_keywords_beside_it() -> None:
    given = DeepSpeedInferenceConfig(mp_size=2, max_tokens=99)
    given.tensor_parallel.tp_grain_size = 4
    read = load_inference_config(given, {"dtype": "fp32", "max_out_tokens": 99})
    assert (read.tensor_parallel.tp_size, read.tensor_parallel.tp_grain_size) == (2, 4)
    assert (read.dtype, read.max_out_tokens) == (torch.float32, 99)
    assert read is not given and given.dtype is torch.float16
    assert read.notes == given.notes == ["mp_size is read as tensor_parallel.tp_size"]
    read.tensor_parallel.tp_size = 7
    assert given.tensor_parallel.tp_size == 2
    for kwargs, text in (
        ({"max_tokens": 98}, "max_out_tokens"),
        ({"mp_size": 3}, "mp_size"),
        ({"tp": 3}, "tensor_par"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_inference_config(given, kwargs)


def test_sources_are_merged_and_compared_as_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "inference.json"
    file.write_text('{"dtype": "half", "tp": {"tp_size": 2}, "zero": {"stage": 3}, "max_tokens": 64}')
    for source in (str(file), file, json.loads(file.read_text())):
        read = load_inference_config(
            source, {"dtype": torch.float16, "tensor_parallel": {"tp_size": 2}, "base_dir": tmp_path}
        )
        assert (read.dtype, read.tensor_parallel.tp_size, read.zero) == (torch.float16, 2, {"stage": 3})
        assert (read.max_out_tokens, read.base_dir) == (64, str(tmp_path))
    for kwargs, shown in (
        ({"dtype": torch.bfloat16}, r'dtype: has two values: dtype = "half", and torch.bfloat16'),
        ({"max_out_tokens": 65}, r"max_out_tokens: has two values: max_tokens = 64, and max_out_tokens = 65"),
        (
            {"tensor_parallel": {"tp_size": 4}},
            r"tensor_parallel: has two values: tp = .*2.*, and tensor_parallel = .*4",
        ),
        ({"mp_size": 4}, r"mp_size and tensor_parallel.tp_size are both given"),
    ):
        with pytest.raises(ConfigError, match=shown) as caught:
            load_inference_config(file, kwargs)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtyp": 1}, r"^dtyp: is not a known key\nFix: did you mean dtype\? To park a key, put x- in front of it."),
        ({"tp_size": 2}, r"did you mean tensor_parallel.tp_size\?"),
        (
            {"num_bits": 4, "q": 1},
            r"^num_bits, q: are not known keys\nFix: the keys here are replace_with_kernel_inject,",
        ),
        ({"zero_optimization": {}}, r"did you mean zero\?"),
        ({"torch_dtype": "fp16"}, r"did you mean dtype\?"),
        ({"max_new_tokens": 4}, r"did you mean max_out_tokens\?"),
        (
            {"tp": {"tp_sise": 4}},
            r"^tensor_parallel.tp_sise \(given as tp\): is not a known key\nFix: did you mean tensor_parallel.tp_size\?",
        ),
        ({"strict": True}, r"^strict: is not a known key"),
        (
            {"max_tokens": -3},
            r"max_out_tokens \(given as max_tokens\): -3 is not an integer > 0\nFix: write .* > 0; the default is 1024",
        ),
        (
            {"tp": {"tp_size": 0}},
            r"tensor_parallel.tp_size \(given as tp\): 0 is not an integer > 0\nFix: write an integer > 0; the default is 1",
        ),
        ({"mp_size": 0}, r"mp_size: 0 is not an integer > 0\nFix: write an integer > 0"),
        ({"mp_size": "x"}, r'mp_size: "x" is not an integer > 0\nFix: write an integer > 0'),
        (
            {"max_out_tokens": 3, "min_out_tokens": 4},
            r"max_out_tokens: is 3, and min_out_tokens is 4\nFix: write a number >= 4",
        ),
        ({"tp": {"enabled": False, "tp_size": 2}}, r"tensor_parallel.enabled: is false, and tp_size is 2"),
        ({"zero": {"stge": 3}}, r"zero.stge: is not a known key\nFix: did you mean zero.stage\?"),
        ({"zero": {"stage": 9}}, r"zero.stage: 9 is not one of"),
        ({"zero": 3}, r"zero: 3 is not a section"),
        ({"injection_policy": {3: "a"}}, r"injection_policy\[3\]: has the type int and is no class of layers"),
        ({"injection_policy": {torch.nn.Linear: ()}}, r"injection_policy\['Linear'\]: is \(\), neither names"),
        ({3: 4}, r"config: the key 3 is not a string"),
    ],
    ids=str,
)
def test_errors_name_the_key_and_the_fix(given: dict[Any, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_inference_config(given, {})


@pytest.mark.parametrize("source", [[1], 3, b"{}", "no/such/file.json", '{"dtype": "fp16"}'])
def test_a_configuration_that_is_no_dictionary(source: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_inference_config(source, {})
    assert caught.value.fix, str(caught.value)


def test_experts_over_ranks_come_later() -> None:
    for given in ({"ep_size": 2}, {"moe": {"ep_size": 2}}, {"moe": DeepSpeedMoEConfig(ep_size=2)}):
        with pytest.raises(FeatureError, match=r"moe.ep_size: 2 asks for experts"):
            load_inference_config(given, {})
    assert load_inference_config({"moe": {"enabled": False, "ep_size": 2}}, {}).moe.ep_size == 2
    with pytest.raises(UnsupportedConfigError, match=r"zero.zero_quantized_weights"):
        load_inference_config({"zero": {"zero_quantized_weights": True}}, {})


def test_zero_is_checked_as_the_section_of_training() -> None:
    section = {"stage": 3, "offload_param": {"device": "cpu"}, "prefetch_bucket_size": 5}
    read = load_inference_config({"zero": section}, {})
    assert read.zero == section and read.zero is not section
    assert any("zero.prefetch_bucket_size is read as zero.stage3_prefetch_bucket_size" in note for note in read.notes)
    assert load_inference_config({"zero": DeepSpeedZeroConfig(stage=1)}, {}).zero["stage"] == 1
    read.zero["stage"] = 1
    assert DeepSpeedInferenceConfig().zero == {}


def test_without_zero_nothing_of_training_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_c.config.inference.read_config", None)  # a call raises TypeError
    for given in ({}, {"zero": {}}, {"zero": None, "mp_size": 2}):
        assert load_inference_config(given, {}).zero == {}


def test_checkpoint_config_is_a_second_place() -> None:
    section = {"checkpoint_dir": "/c", "base_dir": "/b", "save_mp_checkpoint_path": "/s"}
    read = load_inference_config({"ckpt_config": section, "base_dir": "/b"}, {})
    assert (read.checkpoint, read.base_dir, read.save_mp_checkpoint_path) == ("/c", "/b", "/s")


def test_policies_by_class_reach_the_engine_as_given() -> None:
    policy = {torch.nn.Linear: ("a", "b.c"), torch.nn.Conv1d: "d", torch.nn.LSTM: DtypeEnum}
    assert (
        load_inference_config({"injection_policy": policy}, {"injection_dict": dict(policy)}).injection_policy == policy
    )


def test_any_input_is_read_or_refused_with_a_typed_error() -> None:
    chance = random.Random(38)
    keys = [key for name, field in DeepSpeedInferenceConfig.model_fields.items() for key in (name, field.alias) if key]
    keys += ["strict", "foo", "x-1", "zero_optimization"]
    values = [
        *(None, 0, 1, -1, 2.5, 10**30, float("nan"), float("inf"), True, False, "", "x", "auto", b"x", [], [1], ("a",)),
        *(
            {}, {"a": 1}, {1: 2}, {"enabled": None}, {"tp_size": None}, {"strict": True}, {"weight": None}, int,
            object(),
        ),
        *({"activation": []}, {"stage": float("nan")}, {"num_experts": ["a"]}, torch.int8, torch.ones(3), ValueError),
    ]  # fmt: skip
    n_read = 0
    for _ in range(3000):
        given = {key: chance.choice(values) for key in chance.sample(keys, chance.choice([1, 1, 2, 3]))}
        kwargs = {key: chance.choice(values) for key in chance.sample(keys, chance.choice([0, 1]))}
        try:
            read = load_inference_config(given, kwargs)
        except DeepSpeedCError:
            continue
        assert read.max_out_tokens >= read.min_out_tokens and read.tensor_parallel.tp_size >= 1, (given, kwargs)
        assert isinstance(read.dtype, torch.dtype) and isinstance(read.notes, list), (given, kwargs)
        n_read += 1
    assert 100 < n_read < 2900, n_read


def test_notes_tell_what_has_no_effect() -> None:
    assert DeepSpeedInferenceConfig().notes == []
    given = {
        "enable_cuda_graph": True, "use_triton": True, "dtype": "auto", "mp_size": 2, "moe_experts": [4],
        "quant": {"weight": {"q_groups": 2}, "_why": "try"}, "x-later": 1, "replace_method": "auto",
    }  # fmt: skip
    notes = load_inference_config(given, {"comment": "text"}).notes
    assert notes == [
        'dtype is "auto", and no other program fills it: its default "torch.float16" holds',
        "x-later is parked",
        "comment is parked",
        "quant._why is parked",
        "mp_size is read as tensor_parallel.tp_size",
        "moe_experts is read as moe.moe_experts",
        "enable_cuda_graph = true has no effect: this version captures no CUDA graphs",
        "use_triton = true has no effect: no kernel of this version is written in Triton",
        "moe.moe_experts = [4] has no effect: experts run as the modules of the model",
        "quant has no effect: int8 weights have one scale for each row",
    ]


def test_assignments_are_checked() -> None:
    config = DeepSpeedInferenceConfig()
    config.dtype = "bf16"
    config.tensor_parallel.tp_size = "4"
    assert (config.dtype, config.tensor_parallel.tp_size) == (torch.bfloat16, 4)
    for owner, name, value in ((config, "dtype", "fp8"), (config.tensor_parallel, "tp_size", 0), (config, "dtyp", 1)):
        with pytest.raises(ConfigError):
            setattr(owner, name, value)


def test_names_of_deepspeed_lead_here() -> None:
    code = (
        "import deepspeed_c; deepspeed_c.install_as_deepspeed(force=True)\n"
        "from deepspeed.inference.config import *\n"
        "import deepspeed, deepspeed.inference.config as module, deepspeed_c.config.inference as ours\n"
        "from deepspeed_c.inference.config import DeepSpeedTPConfig as tp, DtypeEnum as dtypes\n"
        "names = set(ours.__all__) - {'InferenceSection', 'default_inference_config', 'dtype_of', 'load_inference_config'}\n"
        "assert all(getattr(module, name) is getattr(ours, name) for name in names)\n"
        "assert tp is ours.DeepSpeedTPConfig and dtypes is DtypeEnum and DtypeEnum.from_str('half') is DtypeEnum.fp16\n"
        "assert deepspeed.DeepSpeedInferenceConfig is ours.DeepSpeedInferenceConfig\n"
        "assert deepspeed.default_inference_config()['dtype'] == 'torch.float16'\n"
    )
    done = fresh.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_the_file_is_read_without_torch() -> None:
    code = "import sys, deepspeed_c.config.inference; assert 'torch' not in sys.modules"
    done = ran([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (0, "")
