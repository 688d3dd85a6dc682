"""GradientPath from Python: gradients that a hook takes equal torch's sums, gradients that it does not take go to the
hook's caller, and buckets start in order.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from deepspeed_c import _C
from tests.waits import joined

SIZES = (3, 5, 1, 70_000)  # the last size is large enough to be added without the GIL
BEGINS = (0, 4, 0, 1)
BUCKETS = (0, 0, 1, 1)
ELEMS = (9, 70_001)


class Owner:
    """A stand-in for a path's reducer."""

    def __init__(self, dtype: torch.dtype = torch.float32, launches: bool = False) -> None:
        self.params = [torch.zeros(n, requires_grad=True) for n in SIZES]
        self.buffers = [torch.full((n,), -9.0, dtype=dtype) for n in ELEMS]
        self.path = _C.GradientPath(list(zip(BUCKETS, BEGINS, SIZES)), 2)
        self.left: list[int] = []
        self.opened: list[int] = []
        self.started: list[int] = []
        self.lock = threading.RLock()
        self.path.connect(lock=self.lock, add=self.add, open=self.open, start=self.start)
        self.path.set_mode(takes=True, launches=launches)
        self.handles = [
            param.register_post_accumulate_grad_hook(self.path.hook(i)) for i, param in enumerate(self.params)
        ]

    def add(self, i: int, param: torch.Tensor) -> None:
        assert param is self.params[i]
        self.left.append(i)
        param.grad = None

    def open(self, bucket: int) -> None:
        buffer = self.buffers[bucket]
        self.opened.append(bucket)
        self.path.open(bucket, buffer.data_ptr(), buffer.numel(), buffer.dtype)

    def start(self, bucket: int) -> None:
        self.started.append(bucket)
        self.path.close(bucket)

    def view(self, i: int) -> torch.Tensor:
        return self.buffers[BUCKETS[i]][BEGINS[i] : BEGINS[i] + SIZES[i]]

    def backward(self, i: int, weight: torch.Tensor) -> None:
        (self.params[i] * weight).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_copied_and_added_as_torch_does(dtype, sent):
    owner = Owner(dtype)
    want = [torch.zeros(n, dtype=dtype) for n in SIZES]
    for round in range(3):
        for i, param in enumerate(owner.params):
            grad = torch.randn(SIZES[i], generator=torch.Generator().manual_seed(10 * round + i)).to(sent)
            param.data = param.data.to(sent)
            param.grad = grad.clone()
            owner.path.hook(i)(param)
            assert param.grad is None
            want[i] = want[i].copy_(grad) if round == 0 else want[i].add_(grad)
    for i in range(len(SIZES)):
        assert torch.equal(owner.view(i), want[i]), f"parameter {i}"
    assert owner.opened == [0, 1] and not owner.left
    assert list(owner.path.seen()) == [owner.path.SEEN] * 4
    assert owner.buffers[0][3] == -9
    owner.path.clear_rest(0)
    assert owner.buffers[0].tolist() == [*want[0].tolist(), 0, *want[1].tolist()]


def test_autograd_calls_it():
    owner = Owner(launches=True)
    for i in (1, 0, 3, 2):
        owner.backward(i, torch.full((SIZES[i],), float(i)))
    assert owner.started == [0, 1]
    assert all(param.grad is None for param in owner.params)
    for i in range(4):
        assert (owner.view(i) == i).all()


def sparse(n: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (n,))


class Subclass(torch.Tensor):
    pass


UNCOMMON = {
    "sparse": sparse,
    "gaps": lambda n: torch.ones(2 * n)[::2],
    "another dtype": lambda n: torch.ones(n, dtype=torch.float64),
    "negative view": lambda n: torch._neg_view(torch.ones(n)),
    "subclass": lambda n: torch.ones(n).as_subclass(Subclass),
    "meta": lambda n: torch.ones(n, device="meta"),
    "another length": lambda n: torch.ones(n + 1),
}


@pytest.mark.parametrize("kind", UNCOMMON)
def test_what_only_torch_can_read_is_left_to_it(kind):
    owner = Owner()
    hook = owner.path.hook(1)

    class Holder:
        grad = UNCOMMON[kind](SIZES[1])

    owner.params[1] = Holder()
    hook(owner.params[1])
    assert owner.left == [1] and owner.path.seen()[1] == 0
    assert (owner.buffers[0] == -9).all()
    assert owner.path.missing(0) == [0, 1]


def test_all_is_left_while_it_does_not_take():
    owner = Owner()
    owner.path.set_mode(takes=False, launches=False)
    owner.backward(0, torch.ones(3))
    assert owner.left == [0] and not owner.opened
    owner.params[0].grad = None
    owner.path.hook(0)(owner.params[0])
    assert owner.left == [0], "there is no gradient"


def test_a_buffer_elsewhere_is_written_by_its_owner():
    owner = Owner()
    owner.open = lambda bucket: owner.path.open(bucket, 0, ELEMS[bucket], torch.float32)
    owner.path.connect(lock=owner.lock, add=owner.add, open=owner.open, start=owner.start)
    owner.backward(0, torch.ones(3))
    assert owner.left == [0]
    assert owner.path.note(0) and not owner.path.note(0)
    with pytest.raises(RuntimeError, match="no memory of the host"):
        owner.path.clear_rest(0)


def test_what_is_raised_reaches_the_backward_and_leaves_the_lock():
    owner = Owner(launches=True)

    def start(bucket: int) -> None:
        raise KeyError("the network is gone")

    owner.path.connect(lock=owner.lock, add=owner.add, open=owner.open, start=start)
    owner.backward(1, torch.ones(5))
    with pytest.raises(KeyError, match="the network is gone"):
        owner.backward(0, torch.ones(3))
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(owner.lock.acquire(blocking=False)))
    thread.start()
    joined(thread)
    assert got == [True]


def test_owners_are_collected_with_their_paths():
    owner = Owner()
    gone = weakref.ref(owner)
    owner.backward(0, torch.ones(3))
    owner.hook = owner.path.hook(1)  # a second reference cycle
    for handle in owner.handles:  # the collector does not see into torch's handles
        handle.remove()
    del owner, handle
    gc.collect()
    assert gone() is None


def test_it_says_what_is_wrong():
    path = _C.GradientPath([(0, 0, 2)], 1)
    with pytest.raises(RuntimeError, match="before connect"):
        path.hook(0)(Owner().params[0])
    with pytest.raises(ValueError, match="param is 1, must be 0 to 0"):
        path.hook(1)
    with pytest.raises(TypeError, match="the parameter and nothing else"):
        path.hook(0)()
    with pytest.raises(TypeError):
        type(path.hook(0))()
    for bad in ("mark", "see", "note"):
        with pytest.raises(ValueError, match="param is -1"):
            getattr(path, bad)(-1)
    for bad in ("missing", "close", "fill", "clear_rest"):
        with pytest.raises(ValueError, match="bucket is 1"):
            getattr(path, bad)(1)


def test_buckets_start_in_order():
    path = _C.GradientPath([(0, 0, 1), (0, 1, 1), (1, 0, 1), (2, 0, 1)], 3)
    ready = path.READY
    assert path.next(ready) == -1
    path.mark(2)
    assert path.next(ready) == -1  # bucket 1 is complete, but bucket 0 has to leave first
    path.mark(0)
    path.mark(0)  # contributions add up
    assert path.next(ready) == -1
    path.mark(1)
    assert [path.next(ready), path.next(ready), path.next(ready)] == [0, 1, -1]
    path.mark(0)  # its bucket has left
    assert path.seen()[0] == path.SEEN | path.SEEN_AFTER | path.SEEN_LATE
    path.take_late()
    path.see(0)
    assert path.seen()[0] == path.SEEN
    assert path.next(due=path.ALL) == 2
    assert path.next(path.ALL) == -1
    path.reset()
    path.mark(3)
    assert path.next(ready) == -1
    assert path.seen()[0] == path.SEEN
    path.begin_window()
    assert path.seen() == bytes(4)


def test_waiting_buckets_go_last():
    path = _C.GradientPath([(0, 0, 1), (1, 0, 1), (2, 0, 1)], 3)
    path.set_waiting(0, True)
    for param in range(3):
        path.mark(param)
    assert [path.next(path.READY) for _ in range(3)] == [1, 2, -1]
    path.mark(0)  # after its bucket's turn, and before the reduction
    assert path.seen()[0] == path.SEEN | path.SEEN_AFTER
    assert path.next(path.PROMPT) == -1 and path.next(path.ALL) == 0
    path.reset()
    path.set_waiting(0, False)
    path.mark(0)
    assert path.next(path.READY) == 0


@pytest.mark.parametrize(
    "arguments", [([(0, 0, 1)], -1), ([(1, 0, 1)], 1), ([(-1, 0, 1)], 1), ([(0, 0, 2), (0, 1, 1)], 1)]
)
def test_bad_paths(arguments):
    with pytest.raises(ValueError, match="GradientPath"):
        _C.GradientPath(*arguments)
