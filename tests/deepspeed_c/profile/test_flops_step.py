"""profile/flops_step.py: the section ``flops_profiler`` in engines of all stages, compared with a profile without an
engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_c.logging import logger
from deepspeed_c.profile.flops import FlopsProfiler
from tests.ranks import run_ranks
from tests.training import config, engine_of

B, D, N_STEPS = 3, 12, 4


@pytest.fixture(autouse=True)
def group_of_one():
    """Engines of these tests run in the process of the test, because tests check its output."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        y = self.norm(x)
        return x + self.mlp(x + self.attention(y, y, y, need_weights=False)[0])


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, D), Block(), Block(), nn.Linear(D, 1))


def numbers_of(profiler):
    return (
        *(profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()),
        *(profiler.get_backward(), profiler.get_recomputed()),
    )


def make_engine(stage=0, **sections):
    flops_profiler = {"enabled": True, "profile_step": 2}
    zero = {"stage3_param_persistence_threshold": 0}
    settings = config(stage, "AdamW", rows=B, lr=1e-3, accumulate=2, zero=zero, flops_profiler=flops_profiler)
    return engine_of(make_model(), {**settings, **sections})


def inputs(step, rank=0):
    return torch.randn(B, 7, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine, n_steps=N_STEPS, rank=0, backward=lambda engine, loss: engine.backward(loss)):
    """Step -> the numbers of the profile, read before the step."""
    found = {}
    for step in range(n_steps):
        for _ in range(2):
            backward(engine, engine(inputs(step, rank)).sum())
            if engine._flops._profiler is not None:
                found.setdefault(step, []).append(numbers_of(engine._flops._profiler))
            engine.step()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return found


def in_one_process():
    model = make_model()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(inputs(2)).sum().backward()
    profiler.stop_profile()
    found = numbers_of(profiler)
    profiler.end_profile()
    return found


def body(rank, world, stage, folder):
    engine = make_engine(
        stage, flops_profiler={"enabled": True, "profile_step": 2, "output_file": f"{folder}/{stage}.txt"}
    )
    found = train(engine, rank=rank)
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_numbers_at_each_stage_are_those_of_one_process(stage, tmp_path):
    expected = in_one_process()
    first, second = run_ranks(2, body, stage, str(tmp_path))
    print(first, expected)
    # The profile counts the first micro-batch of the third step and no other.
    assert first == {2: [expected, expected]} and second == {}
    text = (tmp_path / f"{stage}.txt").read_text()
    assert "Profile Summary at step 2" in text and "world size:" in text

    assert f"{round(expected[2] / 1000, 2):g} K = 100% Params" in text


def test_a_backward_of_the_callers_own_is_counted():
    engine = make_engine()
    assert train(engine, backward=lambda engine, loss: loss.backward())[2][0] == in_one_process()
    engine.close()


def test_recomputation_of_the_engine_is_a_column(capsys):
    engine = make_engine(
        activation_checkpointing={"layers": "[12]"}, flops_profiler={"enabled": True, "profile_step": 2}
    )
    flops, macs, params, backward, again = train(engine)[2][0]
    engine.close()
    assert (flops, macs, params, backward) == in_one_process()[:4]
    # All of a block may run again, except perhaps its last product.
    print(again, macs)
    assert macs / 2 < again.macs < macs
    out = capsys.readouterr().out
    assert "recomputed MACs per GPU (counted)" in out and out.count("Profile Summary at step 2") == 1


def test_keys_of_the_section_act(capsys):
    section = {"enabled": True, "profile_step": 1, "detailed": False, "module_depth": 2, "top_modules": 2}
    engine = make_engine(flops_profiler={**section, "recompute_fwd_factor": 0.5})
    train(engine, n_steps=2)
    engine.close()
    out = capsys.readouterr().out
    assert "Detailed Profile" not in out and "depth 1:" in out and "depth 2:" not in out
    assert "recomputed flops per GPU (recompute_fwd_factor 0.5 * fwd)" in out
    assert next(line for line in out.splitlines() if "params      -" in line and "Block" in line).count(":") == 2


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(logger, "warning", lambda text, *args, **_: lines.append(text % args))
    return lines


def test_a_step_after_the_end_of_training_is_told_at_the_end(said, capsys):
    engine = make_engine(flops_profiler={"enabled": True, "profile_step": 50})
    train(engine, n_steps=2)
    engine.close()
    print(said)
    assert [line for line in said if "ended after 2 steps, and profile_step is 50" in line]
    assert "Flops Profiler" not in capsys.readouterr().out


def test_a_file_that_cannot_be_written_costs_no_run(said, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    section = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "file" / "report.txt")}
    engine = make_engine(flops_profiler=section)
    train(engine, n_steps=3)
    engine.close()
    assert [line for line in said if "cannot be written" in line]
    assert "Profile Summary at step 1" in capsys.readouterr().out


def test_a_forward_that_raises_is_profiled_when_it_is_tried_again(capsys):
    engine = make_engine(flops_profiler={"enabled": True, "profile_step": 0})
    with pytest.raises(RuntimeError, match="shape"):
        engine(torch.ones(2, 3))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    with torch.no_grad():
        engine(inputs(0))  # not in training, so not profiled
    assert train(engine, n_steps=1)[0][0] == in_one_process()
    engine.close()
    assert "Profile Summary at step 0" in capsys.readouterr().out


def test_without_the_section_nothing_happens(capsys):
    engine = make_engine(flops_profiler={"enabled": False, "profile_step": 1})
    assert train(engine, n_steps=2) == {}
    engine.close()
    assert "Flops Profiler" not in capsys.readouterr().out
