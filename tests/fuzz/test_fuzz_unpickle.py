"""A short, seeded run of fuzz_unpickle.py, and its unchanged corpus: every file gives a value of plain data or a
CheckpointError.
"""

from __future__ import annotations

import itertools
import pathlib
import warnings

import pytest

from tests.fuzz.fuzz_unpickle import CORPUS, Harness, assemble, inputs, parse, seeds

N_INPUTS = 800


@pytest.mark.filterwarnings("ignore")
def test_changed_pickles_are_read_or_refused(tmp_path: pathlib.Path) -> None:
    harness = Harness(tmp_path)
    for i, data in enumerate(itertools.islice(inputs(5, seeds()), N_INPUTS)):
        try:
            harness.run(data, measures=i % 50 == 0)
        except Exception as error:
            raise AssertionError(f"input {i}: {data!r}"[:5000]) from error
    # The run is a test only if inputs are both read and refused.
    assert harness.n_read > N_INPUTS // 4 and harness.n_refused > N_INPUTS // 4, (harness.n_read, harness.n_refused)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.pkl")), ids=lambda path: path.stem)
def test_the_corpus_is_read_or_refused(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    Harness(tmp_path).run(path.read_bytes(), measures=True)


def test_seeds_are_read_as_they_are(tmp_path: pathlib.Path) -> None:
    """Seeds are unchanged after parsing and assembling, and this package reads most of them."""
    harness = Harness(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The later seeds are sparse tensors, whose numbers differ here, and values that are no tree.
        pool = seeds()[:11]
        for ops in pool:
            data = assemble(ops)
            assert parse(data) == ops
            before = harness.n_read
            harness.run(data, measures=False)
            assert harness.n_read > before, ops
