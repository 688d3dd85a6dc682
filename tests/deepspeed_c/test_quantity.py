"""quantity.py: the spellings of counts, bytes and times that it reads, and the form that it prints."""

from __future__ import annotations

import pytest

from deepspeed_c.errors import ConfigError
from deepspeed_c.quantity import as_binary, parse_bytes, parse_count, parse_seconds


@pytest.mark.parametrize(
    ("text", "number"),
    [("7e9", 7_000_000_000), ("7B", 7_000_000_000), ("350M", 350_000_000), ("1.5k", 1500), ("124000", 124_000)],
)
def test_counts(text, number):
    assert parse_count(text, "here") == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("2e9", 2 * 10**9), ("4GB", 4 * 10**9), ("1.5GiB", 3 << 29), ("512 MiB", 512 << 20), ("7b", 7)],
)
def test_bytes(text, number):
    assert parse_bytes(text, "here") == number


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("60s", 60.0), ("5m", 300.0), ("2 min", 120.0), ("1.5h", 5400.0), ("0", 0.0)]
)
def test_times(text, seconds):
    assert parse_seconds(text, "here") == seconds


@pytest.mark.parametrize("text", ["", "soon", "-3", "5d", "60 sec", "1e-3", "inf"])
def test_other_times_are_refused(text):
    with pytest.raises(ConfigError, match="here: .* is not understood"):
        parse_seconds(text, "here")


@pytest.mark.parametrize("text", ["", "many", "-3", "1e", "3 bytes", "0x10", "nan", "1e-3"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match="here: .* is not understood"):
        parse_count(text, "here")
    with pytest.raises(ConfigError, match="here: .* is not understood"):
        parse_bytes(text, "here")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 30, "1 GiB"),
        ((1 << 20) - 300, "1024 KiB"),
        (1023 << 20, "1023 MiB"),
        (1023995, "1000 KiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_bytes_are_shown_with_a_unit(n_bytes, text):
    assert as_binary(n_bytes) == text
