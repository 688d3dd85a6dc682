"""The chair of an elastic launch under random failures, with a clock and agents of the test's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from deepspeed_c.launcher import chair as chair_module
from deepspeed_c.launcher import meeting
from deepspeed_c.launcher.chair import Chair, RoundPolicy
from deepspeed_c.launcher.meeting import ORDERS_KEY, Failure, Orders, Report, SignedMessages, report_key

SECRET = "s"
TICK = 0.1
LIMIT = 20_000  # ticks of a case: far more than any takes


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Store:
    """The calls of a TCPStore that messages use."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


@dataclass
class Agent:
    """An agent that does as orders say, with ranks that end a while after they are told to."""

    index: int
    life: str
    number: int = 0
    round: int = 0
    state: str = "came"
    master: tuple[str, int] | None = None
    failure: Failure | None = None
    has_all_zeros: bool = False
    was_stopped: bool = False
    is_leaving: bool = False
    n_saves: int = 0
    ends_in: int = 0
    is_linked: bool = True
    history: list[int] = field(default_factory=list)

    def act(self, orders: Orders, rng: random.Random) -> None:
        is_called = orders.round > self.round and self.index in orders.members
        if self.state != "runs" and is_called and not (orders.stop or orders.signal):
            self.round, self.state, self.failure, self.n_saves = orders.round, "came", None, 0
            self.has_all_zeros = self.was_stopped = False
            self.master = ("a", orders.round) if orders.members[0] == self.index else None
        elif self.state == "came" and self.round and (orders.stop or orders.round > self.round):
            self.state, self.was_stopped = "ended", True
        elif self.state == "came" and self.round == orders.round and orders.master is not None:
            self.state = "runs"
            self.history.append(self.round)
        elif self.state == "runs" and (orders.stop or orders.signal or orders.round > self.round) and not self.ends_in:
            self.ends_in = rng.randint(1, 60)
        if self.ends_in:
            self.ends_in -= 1
            if not self.ends_in:
                self.state, self.was_stopped = "ended", True

    def report(self) -> Report:
        self.number += 1
        return Report(
            self.number, self.state, self.life, self.round, self.master, self.failure, self.has_all_zeros,
            self.was_stopped, self.is_leaving, self.n_saves,
        )  # fmt: skip


class World:
    """A chair and its agents. ``tick`` lets all of them act once."""

    def __init__(self, n: int, rounds: RoundPolicy, monkeypatch, seed: int = 0) -> None:
        self.clock, self.rng = Clock(), random.Random(seed)
        monkeypatch.setattr(chair_module, "time", self.clock)
        monkeypatch.setattr(meeting, "time", self.clock)
        self.messages = SignedMessages(Store(), SECRET)
        self.told: list[str] = []
        self.chair = Chair(
            self.messages._store._store, SECRET, [f"h{i}" for i in range(n)], lambda name: "", rounds=rounds,
            tell=self.told.append,
        )  # fmt: skip
        self.agents: list[Agent | None] = [None] * n
        self.n_lives = 0

    def come(self, i: int) -> Agent:
        self.n_lives += 1
        self.agents[i] = Agent(i, f"life{self.n_lives}")
        return self.agents[i]

    @property
    def orders(self) -> Orders:
        return self.messages.read(ORDERS_KEY, Orders)

    def tick(self) -> None:
        self.clock.now += TICK
        for agent in filter(None, self.agents):
            agent.act(self.orders, self.rng)
            if agent.is_linked:
                self.messages.write(report_key(agent.index), agent.report())
        self.chair.step()

    def until(self, condition) -> None:
        for _ in range(LIMIT):
            if condition():
                return
            self.tick()
        raise AssertionError((self.orders, self.agents, self.told))

    def running(self) -> list[int]:
        return [agent.index for agent in self.agents if agent and agent.state == "runs"]


def policy_of(n: int, **options) -> RoundPolicy:
    given = {"min_hosts": 1, "max_hosts": n, "max_restarts": 10, "grace_s": 2.0, "lost_s": 3.0, "is_elastic": True}
    return RoundPolicy(**{**given, **options})


def world_of(monkeypatch, n: int, seed: int = 0, **options) -> World:
    world = World(n, policy_of(n, **options), monkeypatch, seed)
    for i in range(n):
        world.come(i)
    world.until(lambda: len(world.running()) == min(n, world.chair._rounds.max_hosts))
    return world


def test_too_few_hosts_are_left(monkeypatch):
    world = world_of(monkeypatch, 2, min_hosts=2)
    world.agents[1] = None
    world.until(lambda: world.chair.is_over)
    assert world.chair.code == 1
    assert world.chair.failure.how.endswith("1 host is left, and --min_elastic_nodes asks for 2")


def test_no_host_comes(monkeypatch):
    world = World(2, policy_of(2), monkeypatch)
    world.until(lambda: world.chair.is_over)
    assert (world.chair.code, world.chair.failure.how) == (2, "hosts h0, h1 did not come within 60 s")


def test_the_first_rank_that_fails_because_a_host_is_lost_is_not_blamed(monkeypatch):
    world = world_of(monkeypatch, 3)
    world.agents[2] = None
    world.agents[0].failure = Failure("h0", 1, "rank 0 failed", order=1, step=4)
    world.agents[0].state = "ended"
    world.until(lambda: world.orders.round == 2)
    assert world.told == ["host h2: no sign for 3 s (its link or its agent is lost); round 2 begins with 2 of 3 hosts"]
    assert world.chair._failed_steps == []


def test_a_host_waits_for_a_checkpoint_and_for_the_least_time(monkeypatch):
    world = world_of(monkeypatch, 2)
    world.agents[1] = None
    world.until(lambda: world.running() == [0] and world.orders.round == 2)
    monkeypatch.setattr(Agent, "report", lambda self, plain=Agent.report: _with(plain(self), min_seconds=100))
    began = world.clock.now
    world.come(1)
    world.agents[0].n_saves = 5  # noted before the host was seen
    world.until(lambda: world.clock.now - began > 20)
    world.agents[0].n_saves = 6
    world.until(lambda: world.orders.round == 3)
    assert world.clock.now - began > 95
    world.until(lambda: world.running() == [0, 1])


def _with(report, **changes):
    return Report(**{**{name: getattr(report, name) for name in report.__struct_fields__}, **changes})


def test_more_hosts_than_a_round_may_have_stand_by(monkeypatch):
    world = world_of(monkeypatch, 3, max_hosts=2)
    assert world.running() == [0, 1]
    world.agents[0] = None
    world.until(lambda: world.running() == [1, 2])
    assert world.orders.members == (1, 2) and world.orders.master == ("a", 2)


def test_what_cannot_be_started_ends_the_first_round_and_leaves_out_the_host_later(monkeypatch):
    world = world_of(monkeypatch, 2)
    world.agents[1] = None
    world.until(lambda: world.running() == [0] and world.orders.round == 2)
    world.come(1)
    world.until(lambda: 1 in world.chair._waiting)
    world.agents[0].n_saves = 1
    world.until(lambda: world.orders.round == 3)
    world.agents[1].failure = Failure("h1", 2, "host h1: no data", order=3, is_start=True)
    world.agents[1].state, world.agents[1].round = "ended", 3
    world.until(lambda: world.running() == [0] and world.orders.round == 4)
    for _ in range(300):
        world.agents[0].n_saves += 1
        world.tick()
    assert world.orders.round == 4  # the same agent would fail again

    first = World(1, policy_of(1), monkeypatch)
    agent = first.come(0)
    first.until(lambda: agent.round == 1)
    agent.failure = Failure("h0", 2, "host h0: no script", order=1, is_start=True)
    agent.state = "ended"
    first.until(lambda: first.chair.is_over)
    assert first.chair.code == 2


def test_all_that_end_while_a_host_is_to_be_taken_in_are_done(monkeypatch):
    world = world_of(monkeypatch, 2)
    world.agents[1] = None
    world.until(lambda: world.running() == [0] and world.orders.round == 2)
    world.come(1)
    world.until(lambda: 1 in world.chair._waiting)
    world.agents[0].n_saves = 1
    world.agents[0].state, world.agents[0].has_all_zeros = "ended", True  # by themselves, as the order came
    world.until(lambda: world.chair.is_over)
    assert (world.chair.code, world.chair.failure, world.orders.round) == (0, None, 2)


@pytest.mark.parametrize("seed", range(300))
def test_random_failures_never_mix_rounds_and_always_end(monkeypatch, seed):
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    options = {
        "min_hosts": rng.randint(1, n), "max_restarts": rng.choice([0, 3, 1000]), "grace_s": rng.choice([0.0, 2.0, 7.0])
    }  # fmt: skip
    world = World(n, policy_of(n, **options), monkeypatch, seed)
    for i in range(n):
        if rng.random() < 0.9:
            world.come(i)
    order = 0
    for _ in range(rng.randint(100, 1500)):
        if world.chair.is_over:
            break
        world.tick()
        _check(world)
        i = rng.randrange(n)
        agent, event = world.agents[i], rng.random()
        if agent is None:
            if event < 0.02:
                world.come(i)
        elif event < 0.003:
            world.agents[i] = None  # the host is gone
        elif event < 0.005:
            world.come(i)  # its agent is killed and started again at once
        elif event < 0.008:
            agent.is_linked = not agent.is_linked
        elif event < 0.012 and agent.state == "runs" and not agent.ends_in:
            order += 1
            agent.failure = Failure(f"h{i}", 9, "rank failed", order=order, step=rng.randint(1, 50))
            agent.state = "ended"
        elif event < 0.03 and agent.state == "runs":
            agent.n_saves += 1
    # From now on nothing fails: either the launch has given up, or all hosts that are linked end with zeros.
    for agent in filter(None, world.agents):
        agent.is_linked = True

    def finish() -> bool:
        _check(world)
        if len(world.running()) == len(world.orders.members):
            for agent in filter(None, world.agents):
                if agent.state == "runs" and agent.round == world.orders.round and not agent.ends_in:
                    agent.state, agent.has_all_zeros, agent.was_stopped = "ended", True, False
        return world.chair.is_over

    world.until(finish)
    assert (world.chair.code == 0) == (world.chair.failure is None), (world.chair.code, world.chair.failure)


def _check(world: World) -> None:
    """Ranks of an older round run only where the chair cannot know it: on a host that it has lost."""
    orders = world.orders
    if orders.master is None:
        return
    for agent in filter(None, world.agents):
        if agent.state == "runs" and agent.round < orders.round:
            assert agent.index not in orders.members, (agent, orders)
