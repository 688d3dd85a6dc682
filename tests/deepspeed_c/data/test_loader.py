"""data/loader.py: all ranks together get every sample once an epoch. Incomplete last batches, tiny data sets, resumed
positions and users' mistakes are tested too."""

from __future__ import annotations

import inspect
import os
import signal
from collections import Counter
from itertools import chain, islice
from random import Random

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from deepspeed_c.data import DeepSpeedDataLoader, RepeatingLoader
from deepspeed_c.errors import ConfigError, StateError
from tests.log_lines import LogLines
from tests.waits import joined


def make(n, batch, rank=0, world=1, **kwargs):
    return DeepSpeedDataLoader(
        range(n), batch, False, 0, None, data_parallel_world_size=world, data_parallel_rank=rank, **kwargs
    )


def epoch(loader):
    return [batch.tolist() for batch in loader]


def flat(batches):
    return [sample for batch in batches for sample in batch]


SIZES = [0, 1, 2, 3, 7, 12, 13, 101]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("n", SIZES)
def test_every_sample_once_an_epoch(n, batch, world, drop_last):
    loaders = [make(n, batch, rank, world, dataloader_drop_last=drop_last) for rank in range(world)]
    for _ in range(2):
        shares = [epoch(loader) for loader in loaders]
        assert len({len(share) for share in shares}) == 1, "ranks have different numbers of batches: they would hang"
        assert all(len(share) == len(loader) for share, loader in zip(shares, loaders))
        per_rank = n // world if drop_last else -(-n // world)
        seen = Counter(sample for share in shares for sample in flat(share))
        if drop_last:
            assert all(len(b) == batch for share in shares for b in share)
            assert not seen or max(seen.values()) == 1
            assert sum(seen.values()) == world * (per_rank // batch) * batch
        else:
            assert set(seen) == set(range(n)), "a sample was left out"
            assert sum(seen.values()) == world * per_rank
            if n >= world:
                assert not seen or max(seen.values()) <= 2
                assert sum(count - 1 for count in seen.values()) == world * per_rank - n
            sizes = [len(b) for b in shares[0]]
            assert sizes == [batch] * (per_rank // batch) + ([per_rank % batch] if per_rank % batch else [])


@pytest.mark.parametrize("world", [1, 3])
def test_each_epoch_has_its_own_order_which_the_seed_decides(world):
    loader, same, other = make(100, 5, 0, world), make(100, 5, 0, world), make(100, 5, 0, world, seed=7)
    first, second = epoch(loader), epoch(loader)
    assert first != second and [first, second] == [epoch(same), epoch(same)]
    assert epoch(other) != first
    same.set_epoch(0)
    assert epoch(same) == first and epoch(same) == second
    assert same.epoch == 1


def test_without_shuffle_the_order_stays():
    loader = make(10, 4, 1, 2, shuffle=False)
    assert epoch(loader) == epoch(loader) == [[1, 3, 5, 7], [9]]
    assert epoch(make(5, 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_iter_without_a_batch_skips_no_epoch():
    loader, plain = make(20, 4), make(20, 4)
    iter(loader)
    iter(loader)
    repeating = RepeatingLoader(loader)
    assert [next(repeating).tolist() for _ in range(12)] == (epoch(plain) + epoch(plain) + epoch(plain))[:12]


def test_an_epoch_that_was_left_early_is_over():
    loader, plain = make(20, 4), make(20, 4)
    for batch in loader:
        assert batch.tolist() == epoch(plain)[0]
        break
    assert epoch(loader) == epoch(plain)


def test_an_iterator_goes_on_where_it_is_iterated_over_again():
    batches = iter(make(10, 2))
    parts = [list(islice(batches, n)) for n in (2, 1, 5)]
    assert [len(part) for part in parts] == [2, 1, 2]
    assert sorted(flat(chain(*parts))) == list(range(10))


def test_next_works_without_iter():
    loader = make(4, 2)
    assert len(next(loader)) == 2 and len(next(loader)) == 2
    with pytest.raises(StopIteration):
        next(loader)
    assert len(epoch(loader)) == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [0, 1, 4, 5, 6, 13])
def test_a_saved_position_resumes(given, workers):
    def get(loader, n):
        repeating = RepeatingLoader(loader)
        return [next(repeating).tolist() for _ in range(n)]

    straight = get(make(29, 3, 1, 2), given + 8)
    first = make(29, 3, 1, 2, num_local_io_workers=workers)
    get(first, given)
    resumed = make(29, 3, 1, 2, num_local_io_workers=workers)
    resumed.load_state_dict(first.state_dict())
    assert get(resumed, 8) == straight[given:]


def test_a_position_loaded_under_a_running_iterator_counts():
    loader, reference = make(30, 3), make(30, 3)
    batches = epoch(reference)
    repeating = RepeatingLoader(loader)
    for _ in range(7):
        next(repeating)
    repeating.load_state_dict({"epoch": 0, "position": 6})
    assert next(repeating).tolist() == batches[2]
    state = repeating.state_dict()
    assert state == {"epoch": 0, "position": 9, "n_samples": 30, "fingerprint": None, "seed": 0}


def test_a_position_loads_only_what_it_needs():
    loaded = []

    class Recording:
        def __len__(self):
            return 10

        def __getitem__(self, i):
            loaded.append(i)
            return i

    loader = DeepSpeedDataLoader(Recording(), 2, False, 0, None, shuffle=False)
    loader.load_state_dict({"epoch": 3, "position": 8})
    assert epoch(loader) == [[8, 9]] and loaded == [8, 9]


class Named(list):
    fingerprint = "a1"


class Renamed(list):
    fingerprint = "b2"


@pytest.mark.parametrize(
    ("dataset", "seed", "message"),
    [
        (range(9), 0, "with the length 8, and this loader has 9"),
        (range(8), 1, "with the seed 0, and this loader has 1"),
        (Renamed(range(8)), 0, "with the fingerprint 'a1', and this loader has 'b2'"),
    ],
)
def test_positions_in_another_data_set_are_refused(dataset, seed, message):
    def loader_of(dataset, seed=0):
        return DeepSpeedDataLoader(dataset, 2, False, -1, None, seed=seed)

    saved = loader_of(Named(range(8)))
    next(saved)
    loader = loader_of(dataset, seed)
    with pytest.raises(StateError, match=message) as caught:
        loader.load_state_dict(saved.state_dict())
    assert caught.value.fix and loader.state_dict()["position"] == 0
    loader_of(range(8)).load_state_dict(saved.state_dict())  # a data set without a fingerprint may be the same


TRAIN_BATCH = 12


def layouts():
    """(ranks, micro-batch, accumulation) of a training batch."""
    return [
        (ranks, micro, TRAIN_BATCH // (ranks * micro))
        for ranks in (1, 2, 3, 4)
        for micro in (1, 2, 3, 4, 6, 12)
        if TRAIN_BATCH % (ranks * micro) == 0
    ]


@pytest.mark.parametrize("case", range(24))
def test_steps_have_the_same_samples_in_any_layout_and_after_any_resume(case):
    """Against a run in one process with one batch a step: other ranks, micro-batches and workers, changed at each of
    several kills."""
    random = Random(case)
    n, seed, n_steps = TRAIN_BATCH * random.randint(1, 5), random.randrange(1 << 40), 14
    plain = RepeatingLoader(make(n, TRAIN_BATCH, seed=seed))
    wanted = [sorted(next(plain).tolist()) for _ in range(n_steps)]
    kills, got, state = sorted(random.sample(range(1, n_steps), 3)), [], None
    for first, last in zip([0, *kills], [*kills, n_steps]):
        ranks, micro, accumulation = random.choice(layouts())
        workers = random.choice((0, 0, 1, 3))
        loaders = [make(n, micro, rank, ranks, seed=seed, num_local_io_workers=workers) for rank in range(ranks)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        repeating = [RepeatingLoader(loader) for loader in loaders]
        for _ in range(first, last):
            got.append(sorted(s for one in repeating for _ in range(accumulation) for s in next(one).tolist()))
        for one in repeating[: random.randint(0, ranks)]:  # micro-batches of a step that the kill interrupts
            next(one)
        state = {**loaders[0].state_dict(), "epoch": last * TRAIN_BATCH // n, "position": last * TRAIN_BATCH % n}
    assert got == wanted
    for begin in range(0, n_steps * TRAIN_BATCH - n + 1, n):
        of_epoch = [s for step in got for s in step][begin : begin + n]
        assert sorted(of_epoch) == list(range(n))


class Deadly:
    """Ends the worker process that reads a sample, as often as its file says."""

    def __init__(self, n, folder, deadly, times):
        self.n, self.folder, self.deadly, self.times = n, folder, deadly, times

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        deaths = len(list(self.folder.iterdir()))
        if i == self.deadly and get_worker_info() is not None and deaths < self.times:
            (self.folder / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return i


@pytest.mark.parametrize("sampler", [None, "random"])
def test_workers_that_die_are_started_again_and_no_sample_is_lost_or_repeated(tmp_path, sampler):
    dataset = Deadly(23, tmp_path, 11, 2)
    given = None if sampler is None else RandomSampler(range(23))  # draws another order when it is begun again
    with LogLines() as log:
        loader = DeepSpeedDataLoader(dataset, 2, False, -1, None, num_local_io_workers=2, data_sampler=given)
        seen = flat(epoch(loader))
    print(seen, log.lines)
    assert sorted(seen) == list(range(23)) and len(list(tmp_path.iterdir())) == 2
    assert sum("the data worker of process id" in line and "killed by SIGKILL" in line for line in log.lines) == 2


def test_a_sample_that_kills_every_worker_is_an_error(tmp_path):
    loader = DeepSpeedDataLoader(Deadly(4, tmp_path, 0, 99), 1, False, -1, None, num_local_io_workers=1, shuffle=False)
    with pytest.raises(
        StateError, match="SIGKILL, the 4th death for the same batch .epoch 0, after 0 samples"
    ) as caught:
        next(loader)
    assert "num_local_io_workers=0" in caught.value.fix


def test_a_worker_that_dies_between_batches_interrupts_nothing():
    """Torch's handler of SIGCHLD would raise in whatever runs then."""
    loader = DeepSpeedDataLoader(range(40), 2, False, -1, None, num_local_io_workers=1)
    seen = next(loader).tolist()
    worker = loader._batches._workers[0]
    os.kill(worker.pid, signal.SIGKILL)
    joined(worker)
    assert not worker.is_alive()
    seen += [sample for _ in range(19) for sample in next(loader).tolist()]
    assert sorted(seen) == list(range(40))


def test_errors_of_a_data_set_are_not_mistaken_for_deaths():
    class Broken:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            raise RuntimeError("no such file")

    for workers in (0, 1):
        with pytest.raises(RuntimeError, match="no such file"):
            next(DeepSpeedDataLoader(Broken(), 2, False, -1, None, num_local_io_workers=workers))


def test_a_users_sampler_is_used_as_it_is():
    sampler = DistributedSampler(range(12), 2, 0, seed=3)
    loader = make(12, 2, data_sampler=sampler)
    expected = list(sampler)
    assert flat(epoch(loader)) == expected and flat(epoch(loader)) == expected
    loader.set_epoch(5)
    assert sampler.epoch == 5 and flat(epoch(loader)) == list(sampler) != expected
    assert flat(epoch(make(5, 2, data_sampler=SequentialSampler(range(5))))) == [0, 1, 2, 3, 4]


def test_collate_and_timer():
    class Timer:
        n = 0

        def start(self):
            self.n += 1

    timer = Timer()
    loader = DeepSpeedDataLoader(
        [torch.tensor([float(i)]) for i in range(4)], 2, False, -1, timer, collate_fn=lambda samples: tuple(samples)
    )
    batches = list(loader)
    assert all(isinstance(batch, tuple) and len(batch) == 2 for batch in batches) and len(batches) == 2
    assert timer.n == 3  # two batches, and the read that finds the end


def test_a_single_process_shares_with_nobody():
    loader = DeepSpeedDataLoader(range(6), 2, False, -1, None, data_parallel_world_size=3, data_parallel_rank=1)
    assert sorted(flat(epoch(loader))) == list(range(6))


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


def test_streams():
    loader = DeepSpeedDataLoader(Stream(5), 2, False, 0, None)
    assert epoch(loader) == [[0, 1], [2, 3], [4]]
    loader.load_state_dict({"epoch": 1, "position": 4})
    assert epoch(loader) == [[4]]
    with pytest.raises(TypeError):
        len(loader)
    with pytest.raises(ConfigError, match="all 2 ranks would train on the same samples"):
        DeepSpeedDataLoader(Stream(5), 2, False, 0, None, data_parallel_world_size=2, data_parallel_rank=0)
    sharded = Stream(5)
    sharded.is_sharded = True
    DeepSpeedDataLoader(sharded, 2, False, 0, None, data_parallel_world_size=2, data_parallel_rank=0)
    with pytest.raises(ConfigError, match="takes no sampler"):
        DeepSpeedDataLoader(Stream(5), 2, False, 0, None, data_sampler=SequentialSampler(range(5)))


class Stateful(Stream):
    """A stream that goes on by itself, and counts what it reads."""

    def __init__(self, n):
        super().__init__(n)
        self.at, self.n_read = 0, 0

    def __iter__(self):
        while self.at < self.n:
            self.at, self.n_read = self.at + 1, self.n_read + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class CountsEpochs(IterableDataset):
    """Like the streams of mosaicml-streaming: it counts its epochs, whose order differs."""

    def __init__(self):
        self.next_epoch = 0

    def __iter__(self):
        self.next_epoch += 1
        return iter(Random(self.next_epoch).sample(range(9), 9))


def test_a_stream_that_counts_epochs_is_told_where_to_go_on():
    loader = DeepSpeedDataLoader(CountsEpochs(), 2, False, -1, None)
    epochs = [flat(epoch(loader)) for _ in range(3)]
    assert epochs == [Random(i).sample(range(9), 9) for i in (1, 2, 3)]
    loader.set_epoch(1)
    begun = [next(loader).tolist() for _ in range(2)]
    resumed = DeepSpeedDataLoader(CountsEpochs(), 2, False, -1, None)
    resumed.load_state_dict(loader.state_dict())
    assert flat(begun) + flat(epoch(resumed)) == epochs[1]


def test_a_stream_with_a_state_goes_on_without_reading_again():
    first = DeepSpeedDataLoader(Stateful(11), 2, False, 0, None)
    assert [next(first).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    state = first.state_dict()
    resumed = DeepSpeedDataLoader(Stateful(11), 2, False, 0, None)
    resumed.load_state_dict(state)
    assert epoch(resumed) == [[6, 7], [8, 9], [10]] and resumed.dataset.n_read == 5
    assert epoch(resumed) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    sharded = Stateful(11)
    sharded.is_sharded = True
    other = DeepSpeedDataLoader(sharded, 2, False, 0, None, data_parallel_world_size=2, data_parallel_rank=0)
    with pytest.raises(StateError, match="is that of a rank of 1, and there are 2 ranks"):
        other.load_state_dict(state)
    skipped = DeepSpeedDataLoader(Stream(11), 2, False, 0, None)
    skipped.load_state_dict(DeepSpeedDataLoader(Stream(11), 2, False, 0, None).state_dict() | {"position": 6})
    assert epoch(skipped) == [[6, 7], [8, 9], [10]]


def test_a_stream_whose_state_wants_arguments_is_skipped_forward():
    class Counting(Stateful):
        def state_dict(self, num_samples, from_beginning):  # as of mosaicml-streaming
            return {"at": num_samples}

    first = DeepSpeedDataLoader(Counting(7), 2, False, 0, None)
    next(first), next(first)
    state = first.state_dict()
    assert "stream" not in state
    resumed = DeepSpeedDataLoader(Counting(7), 2, False, 0, None)
    resumed.load_state_dict(state)
    assert epoch(resumed) == [[4, 5], [6]]


@pytest.mark.parametrize(
    ("error", "message", "kwargs"),
    [
        (ConfigError, "batch_size: is 0", {"batch_size": 0}),
        (ConfigError, "batch_size: is 2.0", {"batch_size": 2.0}),
        (ConfigError, "num_local_io_workers: is -1", {"num_local_io_workers": -1}),
        (ConfigError, "rank 2 does not exist among 2", {"data_parallel_world_size": 2, "data_parallel_rank": 2}),
        (ConfigError, "without a length", {"dataset": iter([1])}),
    ],
)
def test_mistakes(error, message, kwargs):
    arguments = {"dataset": range(4), "batch_size": 2, "pin_memory": False, "local_rank": 0, "tput_timer": None}
    with pytest.raises(error, match=message) as caught:
        DeepSpeedDataLoader(**{**arguments, **kwargs})
    assert caught.value.fix


def test_repeating_nothing_is_an_error_and_no_end():
    with pytest.raises(ConfigError, match="yields no batch"):
        next(RepeatingLoader(make(0, 2)))
    with pytest.raises(ConfigError, match="yields no batch"):
        next(RepeatingLoader([]))
    assert [next(r) for r in [RepeatingLoader([1, 2])] for _ in range(5)] == [1, 2, 1, 2, 1]


def ranks_body(rank, world):
    loader = DeepSpeedDataLoader(range(10), 2, False, 0, None)
    return flat(epoch(loader)), len(loader)


def test_ranks_are_found_by_themselves(run_ranks):
    shares = run_ranks(3, ranks_body)
    assert set(flat(share for share, _ in shares)) == set(range(10))
    assert [n for _, n in shares] == [2, 2, 2]


def engine_body(rank, world):
    from deepspeed_c.comm.collectives import Collectives

    comm = Collectives(reduce=lambda *_: None)
    loader = DeepSpeedDataLoader.for_engine(list(range(9)), batch_size=2, comm=comm, route="eval")
    with pytest.raises(ConfigError, match="route"):
        DeepSpeedDataLoader.for_engine([1], batch_size=2, comm=comm, route="test")
    return epoch(loader)


def test_for_engine(run_ranks):
    assert run_ranks(2, engine_body) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [0]]]


def test_signature_is_deepspeeds():
    names = (
        "dataset batch_size pin_memory local_rank tput_timer collate_fn num_local_io_workers data_sampler "
        "data_parallel_world_size data_parallel_rank dataloader_drop_last deepspeed_dataloader_config seed shuffle "
        "is_unbroken whole_batches"
    )
    assert list(inspect.signature(DeepSpeedDataLoader).parameters) == names.split()
    assert list(inspect.signature(RepeatingLoader).parameters) == ["loader"]
