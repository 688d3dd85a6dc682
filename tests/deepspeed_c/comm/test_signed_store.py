"""comm/signed_store.py: ranks read each other's values, and refuse values written without the secret."""

from __future__ import annotations

import hashlib
import hmac

import pytest
import torch.distributed as dist

from deepspeed_c.comm.signed_store import SignedStore


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.mark.parametrize("secret", ["s3cret", "", "ä" * 100])
@pytest.mark.parametrize("value", ["", "x", "a value with spaces", "ä\nb", "7" * 100_000])
def test_ranks_with_one_secret_read_each_other(store, secret, value):
    SignedStore(store, secret).write("key", value)
    reader = SignedStore(store, secret)
    assert (reader.read("key"), reader.read("none"), reader.n_forged) == (value, None, 0)


def test_the_signature_is_hmac_over_key_and_value(store):
    SignedStore(store, "s3cret").write("at/1", "value")
    code = hmac.new(b"s3cret", b"at/1\0value", hashlib.sha256).hexdigest()
    assert store.get("at/1") == f"{code} value".encode()


def test_what_a_stranger_writes_is_not_read(store):
    rank, stranger = SignedStore(store, "s3cret"), SignedStore(store, "")
    rank.write("slow/1", "go on")
    good = store.get("slow/1")
    forged = [
        b"",
        b" ",
        b"value",
        b"0" * 64 + b" value",
        good[:-1],
        good + b"x",
        good.replace(b" ", b"", 1),
        b"\xff\xfe \xff",
    ]
    for i, value in enumerate(forged, 1):
        store.set("slow/1", value)
        assert (rank.read("slow/1"), rank.n_forged) == (None, i), value
    stranger.write("slow/1", "value")
    assert rank.read("slow/1") is None
    store.set("slow/2", good)  # signed by a rank, but for another key
    assert rank.read("slow/2") is None
    store.set("slow/1", good)
    assert rank.read("slow/1") == "go on"


def test_a_claim_is_the_first_ones(store):
    first, second = SignedStore(store, "s3cret"), SignedStore(store, "s3cret")
    assert first.claim("judge", "0") and first.claim("judge", "0") and not second.claim("judge", "1")
    assert second.read("judge") == "0"
    store.set("taken", "1")
    assert not first.claim("taken", "1") and first.read("taken") is None


def test_the_secret_is_not_in_the_store(store):
    SignedStore(store, "s3cret").write("key", "value")
    assert b"s3cret" not in store.get("key")


def test_waiting_for_keys(store):
    """Values of strangers end the wait, but do not count."""
    rank, stranger = SignedStore(store, "s3cret"), SignedStore(store, "")
    rank.write("at/0", "")
    assert rank.wait(["at/0"], 60.0) and not rank.wait(["at/0", "at/1"], 0.01)
    stranger.write("at/1", "")
    assert not rank.wait(["at/0", "at/1"], 60.0)
    rank.write("at/1", "here")
    assert rank.wait(["at/0", "at/1"], 60.0)
