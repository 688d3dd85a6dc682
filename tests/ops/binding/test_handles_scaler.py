"""The Python interface of LossScaler, against the same rule in a few lines of Python."""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest

from deepspeed_c import _C


class Model:
    """A second implementation of the rule in dsc/scaler.h."""

    def __init__(self, scale, factor, floor, window, hysteresis, consecutive):
        self.scale, self.factor, self.floor, self.window = scale, factor, floor, window
        self.full, self.left, self.consecutive = hysteresis, hysteresis, consecutive
        self.step, self.last = 0, -1

    def update(self, has_overflow):
        at_floor = False
        if has_overflow:
            if self.left > 1:
                self.left -= 1
            else:
                at_floor = self.scale <= self.floor
                self.scale = max(self.scale / self.factor, self.floor)
            self.last = self.step
        else:
            n_good_before = self.step - self.last - 1
            grows = n_good_before > 0 and n_good_before % self.window == 0
            if self.consecutive or grows:
                self.left = self.full
            if grows:
                self.scale *= self.factor
        self.step += 1
        return at_floor


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 4])
def test_follows_the_rule(consecutive, hysteresis, window):
    scaler = _C.LossScaler(
        initial_scale=64.0,
        min_scale=2.0,
        window_steps=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
    )
    model = Model(64.0, 2.0, 2.0, window, hysteresis, consecutive)
    rng = random.Random(0)
    for i in range(300):
        has_overflow = rng.random() < 0.4
        at_floor = scaler.update(has_overflow)
        wanted = model.update(has_overflow)
        state = scaler.state_dict()
        got = (scaler.scale, scaler.step, state["last_overflow_step"], state["hysteresis_left"], at_floor)
        assert got == (model.scale, model.step, model.last, model.left, wanted), f"after update {i}"


def test_static_scale_never_moves():
    scaler = _C.LossScaler(is_dynamic=False, initial_scale=128.0, window_steps=1)
    for has_overflow in (True, False, True):
        scaler.update(has_overflow)
        assert scaler.scale == 128.0 and not scaler.is_dynamic


def worn_scaler():
    scaler = _C.LossScaler(initial_scale=1024.0, window_steps=3, hysteresis=2)
    for has_overflow in (False, True, True, False):
        scaler.update(has_overflow)
    return scaler


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_go_on_alike(twin_of):
    scaler = worn_scaler()
    twin = twin_of(scaler)
    for has_overflow in (False, False, True, False, False, False):
        assert scaler.update(has_overflow) == twin.update(has_overflow)
        assert scaler.state_dict() == twin.state_dict()


def test_state_dict_goes_back():
    saved = worn_scaler().state_dict()
    assert set(saved) == {"scale", "step", "last_overflow_step", "hysteresis_left"}
    scaler = _C.LossScaler(window_steps=3)
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved


@pytest.mark.parametrize(
    "change", [{"scale": -1.0}, {"scale": math.nan}, {"step": -1}, {"hysteresis_left": 0}], ids=str
)
def test_bad_state_changes_nothing(change):
    scaler = worn_scaler()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="load_state_dict"):
        scaler.load_state_dict({**before, **change})
    with pytest.raises(KeyError, match="step"):
        scaler.load_state_dict({"scale": 1.0})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "config",
    [
        {"initial_scale": 0.0},
        {"initial_scale": math.inf},
        {"factor": 1.0},
        {"min_scale": 0.0},
        {"window_steps": 0},
        {"hysteresis": 0},
    ],
    ids=str,
)
def test_bad_config(config):
    with pytest.raises(ValueError, match="LossScaler"):
        _C.LossScaler(**config)
