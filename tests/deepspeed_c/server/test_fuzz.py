"""Some hundred random requests (fuzz.py has the command for more): each gets an answer, and a good one keeps its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
running = pytest.importorskip("tests.deepspeed_c.server.running")
fuzz = pytest.importorskip("tests.deepspeed_c.server.fuzz")


def test_any_request_gets_an_answer(tmp_path: Any) -> None:
    with running.served(running.chat_folder(tmp_path)) as server:
        counts, problems = fuzz.run(server.url, seed=7, n=400)
        assert not problems, "\n".join(problems[:10])
        assert counts[200] > 50 and counts[400] > 100, counts
        assert (server.model.counts.running, server.model.counts.waiting, server.model.counts.free_blocks) == (0, 0, 60)
        assert server.app.state.gate.n_requests == 0
