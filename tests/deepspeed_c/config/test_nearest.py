"""The edit distance, compared with a brute-force search, and the choice of near names."""

import itertools

import pytest

from deepspeed_c.config.nearest import distance, nearest


def one_edit(word, letters):
    """All words that differ by one insertion, deletion, replacement or swap of neighbours."""
    for i in range(len(word) + 1):
        for letter in letters:
            yield word[:i] + letter + word[i:]
            if i < len(word):
                yield word[:i] + letter + word[i + 1 :]
        if i < len(word):
            yield word[:i] + word[i + 1 :]
        if i + 1 < len(word):
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def test_distance_of_one_is_what_one_edit_makes():
    words = ["".join(letters) for n in range(4) for letters in itertools.product("ab", repeat=n)]
    for a, b in itertools.product(words, words):
        by_search = 0 if a == b else 1 if b in set(one_edit(a, "ab")) else 2
        assert min(distance(a, b), 2) == by_search, (a, b, distance(a, b))


@pytest.mark.parametrize(
    "a, b, expected", [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("ca", "ac", 1), ("ca", "abc", 3)]
)
def test_distance_of_known_pairs(a, b, expected):
    assert distance(a, b) == expected
    assert distance(b, a) == expected


def test_all_equally_near_names_are_given():
    assert nearest("expert_w", ["expert_w1", "expert_w2", "expert_w3", "enabled"]) == [
        "expert_w1", "expert_w2", "expert_w3",
    ]  # fmt: skip


def test_nothing_is_near_what_is_unlike():
    assert nearest("zzzz", ["stage", "enabled"]) == []
    assert nearest("stage", []) == []
    assert nearest("lx", ["lr"]) == ["lr"]
