"""deepspeed_c/data/progress.py: the contents of a bar, and the rank and part that show it."""

from __future__ import annotations

import pytest

from deepspeed_c.data import progress
from deepspeed_c.data.analyzer import DataAnalyzer
from deepspeed_c.data.loader import DeepSpeedDataLoader
from tests.deepspeed_c.data.test_loader import Stream


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)


def test_a_short_one_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 1e9)
    with progress.progress_bar(3, "reads", " samples") as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_shows_how_far_a_stream_was_skipped(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream(11)
    stream.is_sharded = True
    loader = DeepSpeedDataLoader(stream, 2, False, 0, None, data_parallel_world_size=2, data_parallel_rank=rank)
    loader.load_state_dict(loader.state_dict() | {"position": 8})
    assert next(loader).tolist() == [4, 5]
    said = capsys.readouterr().err
    assert ("data loader skips forward: 100%" in said and "2/2" in said) if rank == 0 else said == "", said


def test_a_stream_that_ends_early_shows_what_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DeepSpeedDataLoader(Stream(3), 1, False, 0, None)
    loader.load_state_dict(loader.state_dict() | {"position": 7})
    assert list(loader) == [] and "3/7" in capsys.readouterr().err


@pytest.mark.parametrize(("specific", "shown"), [([], 0), ([1], 1)])
def test_the_first_part_of_an_analyzer_is_shown(specific, shown, tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    analyzer = DataAnalyzer(
        list(range(10)), num_threads=2, specific_threads=specific, save_path=str(tmp_path), metric_names=["itself"],
        metric_functions=[lambda batch: batch], metric_types=["single_value_per_sample"], metric_dtypes=["int64"],
    )  # fmt: skip
    analyzer.run_map()
    said = capfd.readouterr().err
    assert f"worker 0, thread {shown} of 2: 100%" in said and "5/5" in said, said
    assert f"thread {1 - shown}" not in said
