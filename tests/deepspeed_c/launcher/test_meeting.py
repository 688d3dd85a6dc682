"""Agents and the chair at one store: their decisions, also when one of them falls silent."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from deepspeed_c.errors import LaunchError
from deepspeed_c.launcher import chair as chair_module
from deepspeed_c.launcher import meeting as module
from deepspeed_c.launcher.chair import Chair, RoundPolicy
from deepspeed_c.launcher.meeting import Failure, Meeting, connect

SECONDS = 200
NAMES = ["a", "b", "c"]


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))


@pytest.fixture
def agents(store):
    made = []

    def make(*numbers, secret="s", **options):
        found = [
            Meeting(connect(("127.0.0.1", store.port)), secret, NAMES[i], i, len(NAMES), **options) for i in numbers
        ]
        made.extend(found)
        return found

    yield make
    for agent in made:
        agent.close()


def until(condition, chair, seconds=SECONDS):
    """Let the chair work until ``condition()``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        chair.step()
        time.sleep(0.01)


def begun(agents, chair, **options):
    """All three agents, after the ranks may begin."""
    made = agents(0, 1, 2, **options)
    begin(made, (0, 1, 2), chair)
    return made


def begin(made, members, chair):
    """The next round of these agents begins, with the hosts ``members``."""
    until(lambda: all(agent._next_orders() for agent in made), chair)
    assert [agent.next_round() for agent in made] == [members] * len(made)
    made[0]._tell(master=("10.0.0.1", 77))
    until(lambda: all(agent.orders.master for agent in made), chair)
    for agent in made:
        assert agent.begin(("10.0.0.1", 77) if agent is made[0] else None) == ("10.0.0.1", 77)


def chair_of(store, secret="s", lost_s=module.LOST_SECONDS, **options):
    rounds = {"min_hosts": 3, "max_hosts": 3, "max_restarts": 0, "grace_s": 0.0, "is_elastic": False, **options}
    return Chair(store, secret, NAMES, lambda name: f"said of {name}", rounds=RoundPolicy(lost_s=lost_s, **rounds))


def test_all_end_with_0(store, agents):
    chair = chair_of(store)
    made = begun(agents, chair)
    for agent in made:
        assert not chair.is_over
        agent._tell(state="ended", has_all_zeros=True)
    until(lambda: chair.is_over, chair)
    assert (chair.code, chair.failure) == (0, None)
    for agent in made:
        agent.end(has_all_zeros=True)
    assert [agent.next_round() for agent in made] == [None] * 3
    assert [agent.orders.code for agent in made] == [0, 0, 0]


def test_the_first_of_two_failures_is_told(store, agents):
    chair = chair_of(store)
    made = begun(agents, chair)
    made[2].fail(Failure("c", 7, "rank 5 failed"))
    made[0].fail(Failure("a", 9, "rank 0 failed"))
    until(lambda: all(agent.orders.stop for agent in made), chair)
    made[2].fail(Failure("c", 7, "rank 5 failed", tail="why"))  # the lines come later
    for agent in made:
        agent._tell(state="ended")
    until(lambda: chair.is_over, chair)
    assert (chair.code, chair.failure.how, chair.failure.tail) == (7, "rank 5 failed", "why")


@pytest.mark.parametrize(("zeros", "code"), [((True, True, True), 0), ((True, False, True), 143)])
def test_a_signal_reaches_all(store, agents, zeros, code):
    chair = chair_of(store)
    made = begun(agents, chair)
    chair.signal(15)
    until(lambda: all(agent.orders.signal == 15 for agent in made), chair)
    assert not any(agent.orders.kill for agent in made)
    chair.signal(2)
    until(lambda: all(agent.orders.kill for agent in made), chair)
    assert {agent.orders.signal for agent in made} == {15}
    for agent, is_zero in zip(made, zeros, strict=True):
        agent._tell(state="ended", has_all_zeros=is_zero)
    until(lambda: chair.is_over, chair)
    assert chair.code == code


def test_a_chair_that_stood_still_takes_nobody_for_lost(store, agents):
    chair = chair_of(store, lost_s=0.5)
    made = begun(agents, chair, lost_s=0.5)
    for agent in made:
        agent.close()
    time.sleep(1.5)  # as after SIGSTOP and SIGCONT: neither side has said anything
    chair.step()
    assert chair.failure is None and made[0].lost() == ""
    until(lambda: chair.failure is not None, chair)  # but now they are silent while the chair is awake


def test_a_silent_agent_is_lost(store, agents):
    chair = chair_of(store, lost_s=2.0)
    made = begun(agents, chair)
    made[1].close()  # writes no more
    until(lambda: chair.failure is not None, chair)
    assert chair.failure.how.startswith("host b: no sign for") and chair.code == 0
    until(lambda: made[0].orders.stop and made[2].orders.stop, chair)
    for agent in (made[0], made[2]):
        agent._tell(state="ended")
    until(lambda: chair.is_over, chair)
    assert chair.code == 1


def test_a_silent_chair_is_lost(store, agents):
    chair = chair_of(store)
    (agent, *_) = begun(agents, chair, lost_s=2.0)
    deadline = time.monotonic() + SECONDS
    while not agent.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "nothing was heard" in agent.lost()
    agent.end(has_all_zeros=True)
    assert agent.next_round() is None and agent.orders.code is None


def test_a_store_that_has_gone_is_noticed_at_once(agents, store):
    chair = chair_of(store)
    made = begun(agents, chair)
    del chair
    # The fixture's store lives on; a killed launching command leaves a closed connection.
    made[0]._store = None
    made[0]._signed = _Broken()
    made[0]._wake()
    deadline = time.monotonic() + SECONDS
    while not made[0].lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made[0].lost() == "the launching command is lost: Connection reset by peer"


class _Broken:
    def write(self, key, message):
        raise RuntimeError("Connection reset by peer\nmore")


def test_a_host_that_does_not_come_is_named(store, agents, monkeypatch):
    monkeypatch.setattr(chair_module, "COME_SECONDS", 0.3)
    chair = chair_of(store)
    agents(0, 2)
    until(lambda: chair.is_over, chair)
    assert chair.missing == ["b"]
    assert (chair.code, chair.failure.how) == (2, "host b did not come within 0 s")
    assert chair.failure.tail == "said of b"


def test_the_start_of_a_host_that_fails_is_told_at_once(store, agents):
    chair = chair_of(store)
    agents(0, 2)
    chair.end_of_agent("b", 255)
    until(lambda: chair.is_over, chair)
    assert chair.failure.how == "host b did not come: its start ended with exit code 255"


def test_orders_without_the_secret_are_not_read(store, agents):
    chair, forged = chair_of(store, "s"), chair_of(store, "another")
    forged.signal(9)
    (agent,) = agents(0)
    for _ in range(20):
        forged.step()
        time.sleep(0.01)
    assert agent.orders.signal == 0
    until(lambda: agent.orders.number > 0, chair)
    assert agent.orders.signal == 0


def test_a_name_that_is_not_known_is_asked_for_again(monkeypatch, store):
    asked = []

    def later(name, port, **options):
        asked.append(name)
        if len(asked) < 3:
            raise DistError("the name is not known")
        return TCPStore("127.0.0.1", store.port, **options)

    monkeypatch.setattr(module, "TCPStore", later)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    assert connect(("pod-0", 1)).port == store.port
    assert asked == ["pod-0"] * 3


def test_a_store_that_does_not_answer():
    with pytest.raises(LaunchError, match="does not answer"):
        connect(("127.0.0.1", 1), seconds=0.5)


# The thread is inside the store when the interpreter ends: in one of many short calls, or in a long one. The end of the
# interpreter frees the store, and so ends the long call.
AGENT = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from deepspeed_c.launcher import meeting

meeting.period_of = lambda n_hosts: 0.0
meeting.STORE_SECONDS = 1
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=200))
client = meeting.connect(("127.0.0.1", store.port))
if sys.argv[1] == "long":
    def read(self, key, kind):
        store.add("n_reads", 1)
        client.get("absent")
    meeting.SignedMessages.read = read
agent = meeting.Meeting(client, "s", "a", 0, 1)
while not store.check([meeting.report_key(0)]):
    pass
if sys.argv[1] == "long":
    while not store.check(["n_reads"]):
        pass
    agent.close()
sys.exit(5)
"""


@pytest.mark.parametrize("calls", ["short", "long"])
def test_the_process_of_an_agent_is_not_aborted_at_its_end(calls):
    command = [sys.executable, "-c", AGENT, calls]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 5 and "terminate called" not in done.stderr, (done.returncode, done.stderr)
