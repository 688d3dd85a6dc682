"""Scripts run up to ``initialize``. The arguments of ``initialize`` are found, tensors are not allocated, and for a
script that does not get there the error says why."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import deepspeed_c
from deepspeed_c.errors import ConfigError, FeatureError, ModelError
from deepspeed_c.plan.script import find_model


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


WIDTH = 1 << 20  # a matrix of 4 TiB

USUAL = """
    import sys, torch, deepspeed_c
    from torch import distributed as dist
    import helper

    def main():
        deepspeed_c.init_distributed()
        dist.barrier()
        assert helper.VALUE == 7 and dist.get_world_size() == 64 and dist.get_rank() == 0
        width = int(sys.argv[sys.argv.index("--width") + 1])
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
        model.to("cuda" if "--cuda" in sys.argv else "cpu").cuda()
        model.to(torch.bfloat16)
        try:
            engine, *_ = deepspeed_c.initialize(model=model, config={"zero_optimization": {"stage": 3}})
        except Exception:
            print("an error handler is not for the planner")
        raise AssertionError("initialize returned")

    if __name__ == "__main__":
        main()
"""


def test_what_is_passed_is_found_and_takes_no_memory(script, tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    before = (
        sys.argv, list(sys.path), dict(os.environ), deepspeed_c.initialize, torch.nn.Module.to, torch.nn.Module.cuda,
    )  # fmt: skip
    found = find_model(script(USUAL), ["--width", str(WIDTH), "--cuda"], 64)
    weight = found.model[0].weight
    assert weight.is_meta and weight.shape == (WIDTH, WIDTH) and weight.dtype == torch.bfloat16
    assert found.read_source().keys == {"zero_optimization": {"stage": 3}}
    assert found.optimizer is None and not found.is_sharded
    after = (
        sys.argv, list(sys.path), dict(os.environ), deepspeed_c.initialize, torch.nn.Module.to, torch.nn.Module.cuda,
    )  # fmt: skip
    assert before == after
    assert not dist.is_initialized()
    assert torch.empty(1).device.type == "cpu"


def test_every_way_to_name_initialize_and_to_pass_things(script):
    found = find_model(
        script("""
            import torch, types
            from deepspeed_c import initialize, zero
            with zero.Init(config_dict_or_path={}):
                model = torch.nn.Linear(3, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            args = types.SimpleNamespace(deepspeed_config="ds.json")
            initialize(args, model, optimizer, [model.weight])
        """),
        [],
        2,
    )
    assert isinstance(found.optimizer, torch.optim.SGD)
    assert found.model_parameters[0] is found.model.weight
    assert found.is_sharded
    with pytest.raises(ConfigError, match="ds.json: there is no such file"):
        found.read_source()


def test_init_that_is_disabled_shards_nothing(script):
    found = find_model(
        script("""
            import torch
            from deepspeed_c.initialize import initialize
            from deepspeed_c.zero.weights.init import Init
            with Init(enabled=False):
                model = torch.nn.Linear(3, 3)
            initialize(model=model)
        """),
        [],
        2,
    )
    assert found.read_source() is None and not found.is_sharded


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("x = 1\n", "did not call deepspeed_c.initialize", ""),
        ("import sys\nsys.exit(3)\n", "exit code 3 before", ""),
        ("import torch\n\nprint(torch.ones(3).sum().item())\n", "RuntimeError", ":3"),
        ("import torch\ntorch.ones(3).to('cpu')\n", "NotImplementedError", ":2"),
        ("def f():\n    raise ValueError('a bad shape')\n\nf()\n", "a bad shape", ":2"),
        ("import deepspeed_c\ndeepspeed_c.initialize(model=None)\n", "must be a torch.nn.Module", ""),
        ("import deepspeed_c\ndeepspeed_c.initialize(modle=3)\n", "unexpected keyword", ":2"),
    ],
)
def test_scripts_that_do_not_get_there_say_why(script, text, message, line):
    path = script(text)
    with pytest.raises(ModelError, match=message) as caught:
        find_model(path, [], 2)
    if line:
        assert caught.value.where == path + line
    assert caught.value.fix
    assert not dist.is_initialized() and torch.empty(1).device.type == "cpu"


def test_errors_of_ours_and_other_failures_pass_through(script):
    with pytest.raises(ConfigError, match="mine"):
        find_model(
            script("from deepspeed_c.errors import ConfigError\nraise ConfigError('mine', where='here')\n"), [], 2
        )
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        find_model(script("import no_such_module\n"), [], 2)


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="no such script"):
        find_model(str(tmp_path / "nothing.py"), [], 2)


def test_a_pipeline_is_refused_by_name(script):
    text = """
        import torch, deepspeed_c
        from deepspeed_c.pipe import PipelineModule
        net = PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=2)
        deepspeed_c.initialize(model=net, config={})
    """
    with pytest.raises(FeatureError, match="PipelineModule(.|\n)*a rank of each stage"):
        find_model(script(text), [], 4)
