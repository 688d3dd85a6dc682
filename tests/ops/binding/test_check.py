"""Bad tensors are refused before anything is written.

The exception has the right type and names the operator, the argument and both values.
"""

from __future__ import annotations

import resource

import pytest
import torch

from deepspeed_c import _C, ops  # noqa: F401  (registers the operators)

HYPER = (1, 0.01, 0.9, 0.999, 1e-8, 0.1, 0.0, 0.0, 0.0, 0.01, 10.0, 1.0, 1)
CALLS = torch.ops.deepspeed_c


def lists():
    return {name: [torch.ones(4), torch.ones(6)] for name in ("params", "grads", "state0", "state1", "copies")}


def step(given, kind="adamw", hyper=HYPER):
    CALLS.optim_step_(kind, *given.values(), *hyper)


def replaced(name, i, tensor):
    given = lists()
    given[name][i] = tensor
    return given


@pytest.mark.parametrize(
    "given, words",
    [
        (
            replaced("grads", 1, torch.ones(5)),
            ["optim_step_", "argument 2", "grads[1]", "5 elements", "params[1] has 6"],
        ),
        (replaced("state1", 0, torch.ones(5)), ["argument 4", "state1[0]", "5 elements", "has 4"]),
        (replaced("copies", 0, torch.ones(3)), ["argument 5", "copies[0]", "3 elements", "has 4"]),
        (replaced("grads", 1, torch.ones(6).half()), ["grads[1]", "float16", "float32"]),
        (replaced("params", 0, torch.ones(4).double()), ["argument 1", "params[0]", "float64", "bfloat16"]),
        (replaced("params", 0, torch.ones(4).long()), ["params[0]", "int64"]),
        (replaced("params", 0, torch.ones(8)[::2]), ["params[0]", "gaps or overlaps"]),
        (replaced("grads", 0, torch.ones(8)[::2]), ["grads[0]", "other strides than params[0]"]),
        (replaced("params", 0, torch.ones(1).expand(4)), ["params[0]", "gaps or overlaps"]),
        ({**lists(), "grads": [torch.ones(4)]}, ["argument 2", "grads", "has 1 tensors, but params has 2"]),
        ({**lists(), "copies": [torch.ones(4)]}, ["argument 5", "copies", "has 1 tensors"]),
        ({**lists(), "state1": [torch.ones(4).half(), torch.ones(6).half()]}, ["state0 and state1", "two dtypes"]),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_tensors(given, words):
    before = {name: [t.clone() for t in tensors] for name, tensors in given.items()}
    with pytest.raises(ValueError) as caught:
        step(given)
    for word in words:
        assert word in str(caught.value)
    for name, tensors in given.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, before[name])), f"{name} changed"


@pytest.mark.parametrize(
    "at, value, word",
    [
        (0, 0, "step"),
        (1, -1.0, "lr"),
        (1, float("nan"), "lr"),
        (2, 1.0, "beta1"),
        (3, -0.1, "beta2"),
        (5, float("inf"), "weight_decay"),
        (12, 64, "flags"),
    ],
)
def test_bad_hyper_parameters(at, value, word):
    hyper = list(HYPER)
    hyper[at] = value
    given = lists()
    with pytest.raises(ValueError, match=word):
        step(given, hyper=hyper)
    assert all(torch.equal(t, torch.ones_like(t)) for tensors in given.values() for t in tensors)


def test_missing_state_is_refused():
    with pytest.raises(ValueError, match="state"):
        step({**lists(), "state1": []})


def test_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match="adamw.*lamb.*lion"):
        step(lists(), kind="adamax")


def test_halves_for_a_kind_without_norms_are_not_implemented():
    with pytest.raises(NotImplementedError, match="adamw needs no norms"):
        CALLS.optim_norms_("adamw", *lists().values(), *HYPER)


@pytest.mark.parametrize(
    "ratios", [torch.ones(3, dtype=torch.float64), torch.ones(2), torch.ones(4, dtype=torch.float64)[::2]]
)
def test_bad_ratios(ratios):
    with pytest.raises(ValueError, match="ratios.*must be 2 contiguous float64"):
        CALLS.optim_apply_("lamb", *lists().values(), *HYPER, ratios)


def test_tensors_without_data_have_no_kernel():
    given = {name: [t.to("meta") for t in tensors] for name, tensors in lists().items()}
    step(given)  # the fake kernel
    with pytest.raises((ValueError, NotImplementedError)):
        step(replaced("grads", 0, torch.ones(4).to_sparse()))


def test_flat_operators_name_what_is_wrong():
    with pytest.raises(ValueError, match="flat_cast_.*dst.*3 elements.*src"):
        CALLS.flat_cast_(torch.ones(4), torch.ones(3))
    with pytest.raises(ValueError, match="flat_sumsq.*spans\\[1\\].*int64"):
        CALLS.flat_sumsq([torch.ones(4), torch.ones(4).long()])
    with pytest.raises(ValueError, match="flat_scale_.*spans\\[0\\].*gaps"):
        CALLS.flat_scale_([torch.ones(4)[::2]], 2.0)
    with pytest.raises(ValueError, match="flat_reduce_.*srcs\\[1\\].*5 elements.*srcs\\[0\\] has 4"):
        CALLS.flat_reduce_([torch.ones(4), torch.ones(5)], 1.0, False, torch.ones(4))
    with pytest.raises(ValueError, match="flat_reduce_.*acc.*5 elements"):
        CALLS.flat_reduce_([torch.ones(4)], 1.0, False, torch.ones(5))
    with pytest.raises(ValueError, match="muon_momentum_.*updates\\[0\\]"):
        CALLS.muon_momentum_([torch.ones(4)], [torch.ones(4)], [torch.ones(5)], 0.9, 1.0, 0)
    with pytest.raises(ValueError, match="muon_apply_.*updates"):
        CALLS.muon_apply_([torch.ones(4)], [], [], 0.1, 0.0)


def resident_mib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.parametrize("is_refused", [False, True])
def test_no_call_keeps_a_tensor(is_refused):
    """The binding manages the references to the tensors of a list by hand, over the C shim.

    Each leaked reference keeps 4 MiB in this test.
    """

    def call():
        tensors = [torch.ones(2**20) for _ in range(2)]
        if not is_refused:
            CALLS.flat_scale_(tensors, 2.0)
            return
        with pytest.raises(ValueError):
            CALLS.optim_step_("sgd", tensors, [tensors[0]], [], [], [], *HYPER)

    for _ in range(3):
        call()
    before = resident_mib()
    for _ in range(40):
        call()
    assert resident_mib() - before < 100, f"{resident_mib() - before:.0f} MiB more after 40 calls over 8 MiB each"
