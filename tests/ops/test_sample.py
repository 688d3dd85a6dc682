"""The choice of a token: transformers' logits processors as the oracle, frequencies of draws, equal bits in any
company, and errors.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from deepspeed_c.ops import sample
from deepspeed_c.ops.sample import Rules
from tests.ops.data import DTYPES, bits, normal, on_each_setup

transformers = pytest.importorskip("transformers")

PLAIN = [Rules(temperature=0.7), Rules(top_k=50), Rules(top_p=0.9), Rules(min_p=0.02), Rules(repetition_penalty=1.3)]
TOGETHER = [
    Rules(0.8, 50, 0.9, 0.01, 1.2),
    Rules(1.7, 0, 0.95, 0.005, 0.7),
    Rules(0.3, 7, 1.0, 0.1, 1.0),
    Rules(temperature=2.5, top_k=100_000, top_p=0.5),
]


def processed(logits, rules, earlier):
    """The logits of one row after transformers' processors, -inf for words that are not kept."""
    ids = earlier[None] if len(earlier) else torch.zeros(1, 0, dtype=torch.int64)
    steps = [
        (rules.repetition_penalty != 1, transformers.RepetitionPenaltyLogitsProcessor, rules.repetition_penalty),
        (rules.temperature != 1, transformers.TemperatureLogitsWarper, rules.temperature),
        (rules.top_k > 0, transformers.TopKLogitsWarper, rules.top_k),
        (rules.top_p < 1, transformers.TopPLogitsWarper, rules.top_p),
        (rules.min_p > 0, transformers.MinPLogitsWarper, rules.min_p),
    ]
    scores = logits.float()[None]
    for is_used, step, value in steps:
        scores = step(value)(ids, scores) if is_used else scores
    return scores[0]


def words(n_rows, n_words, seed=3):
    """Earlier words of each row, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(n_words, (5 * row,), generator=generator).repeat(1 + row % 2) for row in range(n_rows)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_words, scale", [(1, 1.0), (127, 3.0), (4099, 2.0), (128_256, 3.0)])
def test_distribution_of_transformers(n_words, scale, dtype):
    rules = PLAIN + TOGETHER
    logits = normal(len(rules) * n_words, 1, torch.float32, scale).view(len(rules), n_words)
    if n_words > 1:
        logits[:, 1::9] = -torch.inf
    logits, earlier = logits.to(dtype), words(len(rules), n_words)
    got = sample.probabilities(logits, rules, earlier)
    for row, rule in enumerate(rules):
        if dtype != torch.float32 and rule.top_p < 1:
            continue  # of equal logits at the bound, transformers keeps those that its sort leaves last
        kept = processed(logits[row], rule, earlier[row])
        assert torch.equal(got[row] > 0, kept > -torch.inf), rule
        # In float64, because torch's softmax of 128,256 words in float32 is off by 2e-6 on AVX2.
        exact = kept.double().softmax(-1).float()
        torch.testing.assert_close(got[row], exact, rtol=0, atol=1e-6, msg=lambda m, rule=rule: f"{rule}{m}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p_keeps_the_first_of_equal_logits(dtype):
    logits = torch.tensor([[1.0, 2, 1, 1, 1, 0]]).to(dtype)
    weights = logits[0].double().exp()
    mass = (weights[1] + 1.5 * weights[0]) / weights.sum()
    got = sample.probabilities(logits, [Rules(top_p=float(mass))])
    assert (got[0] > 0).tolist() == [True, True, True, False, False, False]


def test_draws_follow_the_distribution():
    n_draws = 100_000
    logits = normal(30, 2, scale=1.5).expand(n_draws, 30)
    for rules in (Rules(), Rules(0.8, 20, 0.95, 0.01)):
        found, log_probs = sample.tokens(logits, [rules] * n_draws, [5] * n_draws, torch.arange(n_draws))
        p = sample.probabilities(logits[:1], [rules])[0]
        bound = 5 * (n_draws * p * (1 - p)).sqrt()
        assert bool(((found.bincount(minlength=30) - n_draws * p).abs() <= bound).all())
        torch.testing.assert_close(log_probs, p.log()[found], rtol=0, atol=2e-6)


def test_greedy():
    logits = torch.tensor([[0.0, 3, -torch.inf, 3], [5, 1, 5, 4]])
    found, log_probs = sample.tokens(logits, [Rules(temperature=0)] * 2, [1, 2], [0, 0])
    assert found.tolist() == [1, 0] and log_probs.tolist() == [0, 0]
    penalty = Rules(temperature=0, repetition_penalty=2)
    found, _ = sample.tokens(logits, [penalty] * 2, [1, 2], [0, 0], [torch.tensor([1]), torch.tensor([2, 0, 0])])
    assert found.tolist() == [3, 3]
    assert sample.probabilities(logits, [penalty] * 2)[1].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_token_in_any_company(dtype):
    """A row has the same bits at any place, alone, on any setup, and in a strided tensor."""
    rules = (PLAIN + TOGETHER + [Rules(temperature=0)]) * 2
    n_rows, n_words = len(rules), 5003
    logits = normal(n_rows * n_words, 4, dtype, 3.0).view(n_rows, n_words)
    earlier, seeds, positions = words(n_rows, n_words), torch.arange(n_rows) - 4, torch.arange(n_rows) * 2**50
    wanted = sample.tokens(logits, rules, seeds, positions, earlier)

    def check(order, got, what):
        for mine, other in zip(wanted, got):
            assert torch.equal(bits(mine[order]), bits(other)), what

    for setup, got in on_each_setup(lambda: sample.tokens(logits, rules, seeds, positions, earlier), (1, 3)).items():
        check(slice(None), got, setup)
    for order in ([7], list(range(n_rows))[::-1], [3, 3, 0, 12]):
        picked = ([values[i] for i in order] for values in (rules, earlier))
        mine = torch.stack([logits[i] for i in order], 1).T
        picked_rules, picked_earlier = picked
        check(order, sample.tokens(mine, picked_rules, seeds[order], positions[order], picked_earlier), order)


def test_seed_and_position_choose_the_token():
    logits = torch.zeros(1, 1 << 20)
    numbers = [*itertools.product((0, 1, -1), (0, 1, 2**62 - 1))]
    found = {int(sample.tokens(logits, [Rules()], [seed], [position])[0]) for seed, position in numbers}
    assert len(found) == len(numbers)


def test_no_rows():
    none = torch.zeros(0, 7)
    found, log_probs = sample.tokens(none, [], [], [], [])
    assert found.shape == log_probs.shape == (0,) and found.dtype == torch.int64
    assert sample.probabilities(none, []).shape == (0, 7)


LOGITS = torch.zeros(2, 4)
BAD = {
    "temperature of row 1 is -1": {"rules": [Rules(), Rules(temperature=-1)]},
    "top_k of row 0 is -3": {"rules": [Rules(top_k=-3), Rules()]},
    "top_k of 2.500000 in row 1": {"rules": [Rules(), Rules(top_k=2.5)]},
    "top_p of row 1 is 0": {"rules": [Rules(), Rules(top_p=0)]},
    "min_p of row 1 is 2": {"rules": [Rules(), Rules(min_p=2)]},
    "repetition_penalty of row 0 is 0": {"rules": [Rules(repetition_penalty=0), Rules()]},
    "logit 2 of row 1 is NaN": {"logits": torch.tensor([[0.0, 0, 0, 0], [0, 0, torch.nan, torch.nan]])},
    "logit 3 of row 0 is inf": {"logits": torch.tensor([[0.0, 0, 0, torch.inf]] * 2)},
    "all logits of row 1 are -inf": {"logits": torch.tensor([[0.0] * 4, [-torch.inf] * 4])},
    "earlier word 0 of row 1 is 4": {"earlier": [torch.tensor([3]), torch.tensor([4])]},
    "rules must be": {"rules": [Rules()]},
    "logits must be [rows, words]": {"logits": torch.zeros(2, 2, 2)},
    "logits is of float64": {"logits": LOGITS.double()},
    "0 words": {"logits": torch.zeros(2, 0)},
    "n_earlier has 1 numbers for 2 rows": {"earlier": [torch.tensor([3])]},
    "earlier is of int32": {"earlier": [torch.tensor([3], dtype=torch.int32)] * 2},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_calls(message):
    given = {"logits": LOGITS, "rules": [Rules()] * 2, "earlier": None} | BAD[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        sample.probabilities(**given)
    with pytest.raises(ValueError, match=re.escape(message)):
        sample.tokens(**given, seeds=[1, 2], positions=[0, 0])


def test_bad_numbers():
    for message, seeds, positions in (
        ("position of row 1 is -1", [0, 0], [0, -1]),
        ("seeds has 1 numbers for 2 rows", [0], [0, 0]),
        ("positions has 3 numbers for 2 rows", [0, 0], [0, 0, 0]),
    ):
        with pytest.raises(ValueError, match=message):
            sample.tokens(LOGITS, [Rules()] * 2, seeds, positions)
