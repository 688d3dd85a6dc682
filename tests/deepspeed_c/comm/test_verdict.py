"""comm/verdict.py: the conclusions from the positions of ranks. Ranks at different speeds never count as diverged."""

from __future__ import annotations

import random

import pytest

from deepspeed_c.comm.ledger import DONE, ENTERED, WAITING
from deepspeed_c.comm.position import GroupPosition, Position, Presence, ToldEntry
from deepspeed_c.comm.verdict import ended_ranks, judge

LONG = 30.0


def call(seq, op="all-gather", label="w", *, n_bytes=64, phase="forward", state=DONE, seconds=0.0):
    return ToldEntry(seq, op, n_bytes, label, phase, "", state, seconds)


def waits(*args, seconds=LONG + 1, **kwargs):
    return call(*args, state=WAITING, seconds=seconds, **kwargs)


def at(rank, *calls, where="train.py:7 in step", dist_call="", neighbours=None, name="0", ranks=(), axes=""):
    """The position of a rank with one group. Its calls in state WAITING are the blocking ones."""
    blocking = [c for c in calls if c.state == WAITING]
    return Position(
        rank, [GroupPosition(name, list(ranks), axes, blocking, list(calls))], where, dist_call, neighbours or {}
    )


def both(rank, *groups, where="train.py:7 in step"):
    """The position of a rank in several groups, each (name, ranks, calls)."""
    parts = [
        GroupPosition(n, list(r), "", [c for c in calls if c.state == WAITING], list(calls)) for n, r, calls in groups
    ]
    return Position(rank, parts, where, "", {})


def verdict(*positions, world=None, presences=None):
    return judge({p.rank: p for p in positions}, presences or {}, world or len(positions), LONG)


def test_another_collective_under_the_same_number():
    found = verdict(
        at(0, call(811), waits(812, label="layers.7.mlp.w1")),
        at(1, call(811), waits(812, "reduce-scatter", "layers.8.mlp.w2", phase="backward", n_bytes=128)),
    )
    assert found.kind == "diverged" and found.lasting, found
    assert "#812 is not the same on all ranks" in found.text
    assert "rank 0 entered all-gather #812 of layers.7.mlp.w1 (forward), 64 bytes" in found.text
    assert "rank 1 entered reduce-scatter #812 of layers.8.mlp.w2 (backward), 128 bytes" in found.text
    assert "rank 0 waits in all-gather #812 of layers.7.mlp.w1 (forward) for 31 s" in found.text
    assert "Fix: " in found.text


def test_a_group_of_a_mesh_is_told_by_its_axes():
    group = {"ranks": (0, 2), "axes": "dp_shard"}
    text = verdict(at(0, waits(7), **group), at(1), at(2, waits(7, label="v"), **group)).text
    assert "collective #7 over dp_shard (ranks 0, 2) is not the same on all ranks" in text, text
    assert "rank 2 waits in all-gather #7 of v (forward) over dp_shard (ranks 0, 2) for 31 s" in text, text


@pytest.mark.parametrize("other", [{"label": "v"}, {"n_bytes": 65}, {"op": "all-reduce"}])
def test_each_part_of_an_entry_counts(other):
    found = verdict(at(0, waits(1)), at(1, waits(1)), at(2, waits(1, **other)))
    assert found.kind == "diverged", found
    assert "ranks 0-1 entered all-gather #1 of w (forward), 64 bytes" in found.text, found.text


@pytest.mark.parametrize("op", ["comm.all_to_all", "comm.all_to_all_single", "comm.all_gather", "comm.scatter"])
def test_calls_that_may_be_uneven(op):
    found = verdict(at(0, waits(1, op, n_bytes=8)), at(1, waits(1, op, n_bytes=16)))
    assert found.kind == "transfer", found


def test_phase_and_module_are_no_part_of_an_entry():
    assert verdict(at(0, waits(1)), at(1, waits(1, phase="backward"))).kind == "transfer"


def test_the_first_entry_that_differs_is_named_even_if_both_went_on():
    found = verdict(
        at(0, call(5, label="a"), call(6, label="b"), waits(7, label="c")),
        at(1, call(5, label="a"), call(6, label="c"), waits(7, label="d")),
    )
    assert "collective #6 is not the same" in found.text and "entered all-gather #6 of b" in found.text, found.text


def test_the_same_entry_is_a_transfer():
    assert verdict(at(0, call(1), waits(2)), at(1, call(1), waits(2))).kind == "transfer"


def test_a_rank_that_runs_is_late():
    found = verdict(at(0, call(1), waits(2)), at(1, call(1), where="eval.py:9 in evaluate"), at(2, call(1), waits(2)))
    assert found.kind == "slow" and not found.lasting and not found.passing, found
    assert found.text.startswith("rank 1 lets others wait; the run goes on when it comes")
    assert "ranks 0, 2 wait in all-gather #2 of w (forward) for 31 s" in found.text
    assert "rank 1 is at eval.py:9 in evaluate, after all-gather #1 of w (forward)" in found.text


def test_a_rank_behind_that_still_receives_what_the_others_have_is_no_divergence():
    # Rank 0 sent its broadcast and went on. Rank 1 still receives.
    found = verdict(at(0, call(4, "broadcast"), waits(5)), at(1, waits(4, "broadcast")))
    assert found.kind == "slow", found


def test_a_call_of_torch_that_is_not_in_the_ledger():
    found = verdict(
        at(0, call(1), waits(2, label="layers.1.w")), at(1, call(1), dist_call="barrier", where="a.py:3 in f")
    )
    assert found.kind == "diverged" and found.passing and not found.lasting, found
    assert "rank 1 is in torch.distributed.barrier, called at a.py:3 in f, after all-gather #1" in found.text


def test_such_a_call_may_wait_for_a_rank_that_runs():
    found = verdict(at(0, call(1), waits(2)), at(1, call(1), dist_call="barrier"), at(2, call(1)))
    assert found.kind == "slow", found


def test_two_groups_waiting_for_each_other():
    found = verdict(
        both(0, ("0", (), [call(1)]), ("7", (0, 1), [waits(1, label="experts")])),
        both(1, ("0", (), [call(1), waits(2, label="dense")]), ("7", (0, 1), [])),
        both(2, ("0", (), [call(1), waits(2, label="dense")])),
    )
    assert found.kind == "diverged" and found.passing and not found.lasting, found
    assert "ranks 0-1 wait for each other" in found.text
    assert "rank 0 waits in all-gather #1 of experts (forward) of the group of ranks 0-1 for 31 s" in found.text
    assert "ranks 1-2 wait in all-gather #2 of dense (forward) for 31 s" in found.text


def test_numbers_of_different_groups_are_not_compared():
    found = verdict(
        both(0, ("a", (0, 1), [waits(1, label="x")])),
        both(1, ("a", (0, 1), [waits(1, label="x")])),
        both(2, ("b", (2, 3), [waits(1, label="y")])),
        both(3, ("b", (2, 3), [waits(1, label="y")])),
    )
    assert found.kind == "transfer", found


def test_waiting_in_different_orders():
    a = at(0, waits(1), call(2, state=ENTERED))
    b = at(1, call(1, state=ENTERED), waits(2))
    found = verdict(a, b)
    assert found.kind == "diverged" and found.passing and not found.lasting, found
    assert "in different orders" in found.text
    # A short wait proves nothing, and a finished call does not count as one whose wait comes later.
    assert verdict(a, at(1, call(1, state=ENTERED), waits(2, seconds=1.0))).kind == "transfer"
    assert verdict(a, at(1, call(1, state=DONE), waits(2))).kind == "transfer"


HERE = Presence("node7 boot pid:[4]", 123, 5)


@pytest.mark.parametrize(
    ("presence", "life", "kind", "text"),
    [
        (None, None, "slow", "has not come to deepspeed_c.initialize() yet"),
        (HERE, None, "diverged", "does not answer (process 123 on node7)"),
        (HERE, "gone", "diverged", "has ended without a word (process 123 on node7)"),
        (HERE, "stopped", "diverged", "is stopped by a signal"),
        (HERE, "traced", "slow", "is held by a debugger"),
        (HERE, "runs", "slow", "gives no answer: something holds Python's interpreter lock"),
        (Presence("node7", 123, 5, "closed"), None, "slow", "has closed every engine"),
        (Presence("node7", 123, 5, "closed"), "gone", "diverged", "has ended without a word"),
        (Presence("n", 1, 5, "ended", " with ValueError: boom"), None, "diverged", "has ended with ValueError: boom"),
    ],
)
def test_a_rank_that_does_not_answer(presence, life, kind, text):
    neighbours = {1: life} if life else {}
    found = verdict(
        at(0, waits(1), neighbours=neighbours), world=2, presences={1: presence} if presence is not None else {}
    )
    assert found.kind == kind, found
    assert f"rank 1 {text}" in found.text, found.text


def test_a_lost_rank_that_nobody_waits_for_is_no_reason_yet():
    found = verdict(
        both(0, ("a", (0, 1), [waits(1)])),
        both(1, ("a", (0, 1), [])),
        world=3,
        presences={2: Presence("n", 1, 5, "ended")},
    )
    assert found.kind == "slow" and found.text.startswith("rank 1 lets"), found


def test_a_message_proves_nothing():
    found = verdict(at(0, waits(3)), at(1, waits(0, "comm.recv", "")))
    assert found.kind == "slow", found
    assert "rank 1 waits in comm.recv (forward) for 31 s" in found.text, found.text


def test_a_thousand_ranks_are_a_few_lines():
    world = 1000
    ranks = [at(r, waits(9)) for r in range(world) if r not in (17, 500)]
    found = verdict(*ranks, at(17, call(8)), at(500, waits(9, label="v")), world=world)
    assert found.kind == "diverged" and len(found.text.splitlines()) < 10, found.text
    assert "ranks 0-16, 18-499, 501-999 wait in all-gather #9" in found.text, found.text
    everywhere = [at(r, call(1), where=f"a.py:{r} in f") for r in range(1, world)]
    found = verdict(at(0, waits(2)), *everywhere)
    assert found.kind == "slow" and len(found.text.splitlines()) < 30 and "more places" in found.text, found.text


def test_ended_ranks_are_told():
    presences = {0: HERE, 1: Presence("node7", 9, 5, "ended", " with KeyError: 'x'"), 2: None, 3: HERE}
    told = ended_ranks(presences, {0: "runs", 3: "gone"})
    assert told == [
        "rank 1 has ended with KeyError: 'x' (process 9 on node7)",
        "rank 3 has ended without a word (process 123 on node7)",
    ]


# ---- a simulated run: ranks that execute lists of collectives in groups, one step of one rank at a time


class Simulation:
    """Each rank has a list of collectives, each (group, label). It enters the next collective of its list, and goes on
    when all members of the group have entered theirs with the same number."""

    def __init__(self, programs, groups):
        self.programs, self.groups = programs, groups
        self.pc = [0] * len(programs)
        self.waiting = [None] * len(programs)  # (group, number)
        self.entered = [{name: [] for name in groups} for _ in programs]

    def step(self, rank):
        """Runs one step of a rank. Returns whether the rank could make a step."""
        if self.waiting[rank] is not None:
            name, seq = self.waiting[rank]
            if any(len(self.entered[m][name]) < seq for m in self.groups[name]):
                return False
            self.waiting[rank] = None
            return True
        if self.pc[rank] == len(self.programs[rank]):
            return False
        name, label = self.programs[rank][self.pc[rank]]
        self.pc[rank] += 1
        self.entered[rank][name].append(label)
        self.waiting[rank] = (name, len(self.entered[rank][name]))
        return True

    def has_ended(self, rank):
        return self.waiting[rank] is None and self.pc[rank] == len(self.programs[rank])

    def verdict(self):
        positions, presences = {}, {}
        for rank in range(len(self.programs)):
            if self.has_ended(rank):
                presences[rank] = Presence("n", rank + 1, 5, "ended")
                continue
            parts = []
            for name, labels in self.entered[rank].items():
                calls = [call(i, label=label) for i, label in enumerate(labels, 1)]
                if self.waiting[rank] is not None and self.waiting[rank][0] == name:
                    calls[-1] = waits(len(labels), label=labels[-1])
                parts.append((name, self.groups[name], calls))
            positions[rank] = both(rank, *parts)
        return judge(positions, presences, len(self.programs), LONG) if positions else None


def random_run(rng):
    world = rng.randint(2, 5)
    groups = {"world": list(range(world))}
    for name in "ab":
        groups[name] = sorted(rng.sample(range(world), rng.randint(1, world)))
    order = [(rng.choice(sorted(groups)), rng.choice("xyz")) for _ in range(rng.randint(1, 8))]
    programs = [[(name, label) for name, label in order if r in groups[name]] for r in range(world)]
    return programs, groups


def test_ranks_of_one_program_never_diverge_whenever_they_are_looked_at():
    rng = random.Random(0)
    looked = 0
    for _ in range(300):
        programs, groups = random_run(rng)
        # All programs end with a collective, so no rank ends while others wait for transfers under way.
        simulation = Simulation([[*p, ("world", "end")] for p in programs], groups)
        for _ in range(60):
            simulation.step(rng.randrange(len(programs)))
            if any(simulation.has_ended(r) for r in range(len(programs))):
                break
            found = simulation.verdict()
            looked += 1
            assert found.kind != "diverged", (programs, simulation.pc, found.text)
    assert looked > 3000, looked


def test_whoever_is_stuck_for_ever_has_diverged():
    rng = random.Random(1)
    stuck = 0
    for _ in range(600):
        programs, groups = random_run(rng)
        program = rng.choice([p for p in programs if p] or programs)
        if not program:
            continue
        i = rng.randrange(len(program))
        change = rng.choice(["drop", "add", "swap", "other"])
        if change == "drop":
            del program[i]
        elif change == "add":
            program.insert(i, program[i])
        elif change == "swap":
            j = rng.randrange(len(program))
            program[i], program[j] = program[j], program[i]
        else:
            program[i] = (program[i][0], "w")
        simulation = Simulation(programs, groups)
        while any(simulation.step(r) for r in range(len(programs))):
            pass
        if all(simulation.has_ended(r) for r in range(len(programs))):
            continue
        stuck += 1
        found = simulation.verdict()
        assert found.kind == "diverged", (programs, groups, simulation.pc, found.text)
    assert stuck > 100, stuck
