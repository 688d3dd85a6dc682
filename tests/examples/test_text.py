"""examples/text.py: windows that cut the text exactly, a corpus that is held out by file, the entropy formula."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from text import Windows, bits, sources, spread, standard_library, unigram_entropy


@pytest.mark.parametrize("n_bytes", [0, 1, 4, 5, 8, 9, 97])
def test_windows_follow_one_another_and_share_one_byte(n_bytes):
    text = bytes(range(n_bytes))
    windows = Windows(text, context=4)
    cut = [bytes(windows[i].tolist()) for i in range(len(windows))]
    assert cut == [text[i : i + 5] for i in range(0, n_bytes - 4, 4)]
    with pytest.raises(IndexError, match=f"window {len(cut)} of {len(cut)}"):
        windows[len(cut)]


def test_the_corpus_is_the_same_each_time_and_keeps_to_its_cap():
    train, held_out = standard_library(max_bytes=500_000)
    assert (train, held_out) == standard_library(max_bytes=500_000)
    assert 100_000 < len(train) <= 500_000 and 0 < len(held_out) < len(train)
    assert held_out not in train


def test_sources_leave_tests_and_packages_out(tmp_path):
    for name in ("a.py", "b/c.py", "test/d.py", "site-packages/e.py", "b/tests/f.py", "b/g.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert sorted(sources(tmp_path)) == ["a.py", "b/c.py"]


def test_a_standard_library_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("text.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no .py files"):
        standard_library()


@pytest.mark.parametrize("n, wanted", [(0, []), (1, [0]), (3, [0, 3, 6]), (10, list(range(10))), (99, list(range(10)))])
def test_windows_are_spread_over_the_text(n, wanted):
    assert spread(Windows(bytes(41), 4), n) == wanted


def test_entropy_is_the_formula():
    text = b"aaaabbc" * 13
    counts = Counter(text)
    expected = -sum(n / len(text) * math.log(n / len(text)) for n in counts.values())
    assert unigram_entropy(text) == pytest.approx(expected, rel=1e-12)
    assert bits(unigram_entropy(bytes(range(256)))) == pytest.approx(8.0, rel=1e-12)
    assert unigram_entropy(b"aaa") == 0.0
