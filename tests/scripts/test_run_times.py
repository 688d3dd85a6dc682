"""scripts/run_times.py: figures of logs as `.ci/run` prints them, and logs that are not whole."""

from __future__ import annotations

import pytest

from scripts import run_times

LOG = """\
....... [100%]
============================== processor seconds ===============================
by kind:
   900.0 s 60.0 %  interpreters and other programs
   600.0 s 40.0 %  ranks and forked programs
by folder:
    86.6 s 41.8 %  tests/deepspeed_c/comm
= 11551 passed, 363 skipped, 46 warnings, 1 rerun in 1151.23s (0:19:11) =
continuous integration: 1389 s at commit ab5f45f9
"""


def test_figures_of_a_log():
    run = run_times.read_run(LOG, "ci.log")
    kinds = {"interpreters and other programs": 900.0, "ranks and forked programs": 600.0}
    assert run == ("ab5f45f9", 1389, "11551 passed, 363 skipped, 46 warnings, 1 rerun", 1151.23, kinds)
    text = run_times.table([run, run])
    print(text)
    assert text.count("| ab5f45f9 | 23 min 09 s | 19 min 11 s | 11551 passed") == 2
    assert "1500 together: interpreters and other programs 60 %, ranks and forked programs 40 %." in text


@pytest.mark.parametrize("left_out", ["continuous integration", "by kind", "passed"])
def test_a_log_that_is_not_whole_changes_nothing(tmp_path, capsys, monkeypatch, left_out):
    document = tmp_path / "CONTRIBUTING.md"
    document.write_text(f"a\n{run_times.BEGIN}\nold\n{run_times.END}\nb\n")
    monkeypatch.setattr(run_times, "DOCUMENT", document)
    log = tmp_path / "ci.log"
    log.write_text("\n".join(line for line in LOG.splitlines() if left_out not in line))
    assert run_times.main([str(log)]) == 1 and "no log of a whole run" in capsys.readouterr().err
    assert "old" in document.read_text() and run_times.main([]) == 2
    log.write_text(LOG)
    assert run_times.main([str(log)]) == 0
    found = document.read_text()
    assert "old" not in found and found.startswith("a\n<!--") and found.endswith("-->\nb\n") and "23 min 09 s" in found
