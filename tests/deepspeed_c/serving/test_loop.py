"""The loop of requests: each answer is that of the prompt alone, whatever else runs, is cancelled or fails."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from deepspeed_c.errors import ModelError, StateError
from deepspeed_c.inference.v2 import RaggedInferenceEngineConfig, SchedulingError, build_hf_engine
from deepspeed_c.ops.kv import BLOCK_TOKENS
from deepspeed_c.ops.sample import Rules
from deepspeed_c.serving import AnswerEvent, FinishReason, RequestLoop, SamplingParams, ServedRequest
from tests import waits
from tests.deepspeed_c.serving.folders import byte_tokenizer, model_folder

transformers = pytest.importorskip("transformers")

GREEDY = Rules(temperature=0.0)


pytestmark = pytest.mark.usefixtures("process_group_of_the_engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("model"))


def loop_of(folder: str, n_blocks: int = 40, **limits: Any) -> RequestLoop:
    memory = {"mode": "allocate", "size": n_blocks}
    manager = {"max_context": 200, "max_ragged_batch_size": 64, "max_ragged_sequence_count": 8}
    config = RaggedInferenceEngineConfig(state_manager={**manager, "memory_config": memory, **limits})
    tokenizer = byte_tokenizer()
    return RequestLoop(build_hf_engine(folder, config), tokenizer.decode, len(tokenizer))


class Answer:
    """What a request has got."""

    def __init__(self) -> None:
        self.events: list[AnswerEvent] = []

    def __call__(self, event: AnswerEvent) -> None:
        self.events.append(event)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if event.token is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def end(self) -> Any:
        """The reason, or the error; None before."""
        return (self.events[-1].reason or self.events[-1].error) if self.events else None


def ask(
    loop: RequestLoop, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], salt: str = ""
) -> list[Answer]:
    answers = [Answer() for _ in prompts]
    each = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, wish, answer in zip(prompts, each, answers, strict=True):
        loop.submit(loop.check(prompt, wish), answer, salt)
    loop.run_until(lambda: all(answer.end is not None for answer in answers))
    return answers


def free_blocks(loop: RequestLoop) -> int:
    return int(loop._engine.free_blocks.min())


def prompts_of(n: int, seed: int, longest: int = 50) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 250) for _ in range(rng.randrange(1, longest))] for _ in range(n)]


def by_transformers(folder: str, prompt: list[int], n_new: int, **how: Any) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False, pad_token_id=0, **how
    )
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("n_blocks", [7, 11, 40])
def test_each_answer_is_that_of_transformers(folder: str, n_blocks: int) -> None:
    """Small pools put requests back, and a prompt longer than a step is read in pieces."""
    prompts = [*prompts_of(9, 1), [7] * 70, [3]]
    loop = loop_of(folder, n_blocks)
    answers = ask(loop, prompts, SamplingParams(n_new=20, rules=GREEDY))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = by_transformers(folder, prompt, 20, eos_token_id=None)
        assert (answer.tokens, answer.end) == (expected, FinishReason.LENGTH)
        assert answer.text == byte_tokenizer().decode(expected)
    assert loop._schedule.n_put_back > 0 if n_blocks == 7 else n_blocks == 11 or loop._schedule.n_put_back == 0
    assert (free_blocks(loop), loop.n_requests) == (n_blocks, 0)


def test_a_sampled_answer_is_the_same_in_any_company(folder: str) -> None:
    prompts = prompts_of(6, 2)
    rules = [Rules(), Rules(temperature=0.7, top_p=0.9), Rules(top_k=5), Rules(min_p=0.1), Rules(2.0), GREEDY]
    params = [SamplingParams(n_new=15, rules=each, seed=seed) for seed, each in enumerate(rules)]
    together = ask(loop_of(folder, 9), prompts, params)
    for prompt, wish, answer in zip(prompts, params, together, strict=True):
        alone = ask(loop_of(folder), [prompt], wish)[0]
        assert (answer.tokens, answer.text) == (alone.tokens, alone.text)
    other = ask(loop_of(folder), [prompts[0]], SamplingParams(n_new=15, seed=77))[0]
    assert other.tokens != together[0].tokens


def test_an_end_token_ends_and_its_text_is_not_there(folder: str) -> None:
    prompt = prompts_of(1, 3)[0]
    free = ask(loop_of(folder), [prompt], SamplingParams(n_new=12, rules=GREEDY))[0].tokens
    end = free[5]
    first = free.index(end)
    answer = ask(loop_of(folder), [prompt], SamplingParams(n_new=12, rules=GREEDY, ends=frozenset([end])))[0]
    assert (answer.tokens, answer.end) == (free[: first + 1], FinishReason.STOP)
    assert answer.text == byte_tokenizer().decode(free[:first])


@pytest.mark.parametrize("n_least", [0, 1, 9])
def test_no_end_token_comes_among_the_least_ones(folder: str, n_least: int) -> None:
    prompt = prompts_of(1, 3)[0]
    end = ask(loop_of(folder), [prompt], SamplingParams(n_new=1, rules=GREEDY))[0].tokens[0]
    wish = SamplingParams(n_new=12, rules=GREEDY, ends=frozenset([end]), n_least=n_least)
    answer = ask(loop_of(folder), [prompt], wish)[0]
    expected = by_transformers(folder, prompt, 12, eos_token_id=end, min_new_tokens=n_least)
    assert answer.tokens == expected


def test_a_stop_string_over_tokens_ends_the_text_before_it(folder: str) -> None:
    prompt = prompts_of(1, 4)[0]
    whole = ask(loop_of(folder), [prompt], SamplingParams(n_new=30, rules=GREEDY))[0]
    pieces = [event.text for event in whole.events if event.text]
    at = next(i for i in range(3, len(pieces) - 1) if pieces[i] and pieces[i + 1])
    stop = pieces[at][-1] + pieces[at + 1][0]
    answer = ask(loop_of(folder), [prompt], SamplingParams(n_new=30, rules=GREEDY, stop=("never", stop)))[0]
    assert (answer.text, answer.end) == (whole.text[: whole.text.index(stop)], FinishReason.STOP)
    assert len(answer.tokens) < 30


def test_a_pieced_text_has_no_half_characters(folder: str) -> None:
    """The text behind a prompt is that of the whole sequence."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode("größer 日本")
    answer = ask(loop_of(folder), [prompt], SamplingParams(n_new=40, rules=GREEDY, continues=True))[0]
    whole = tokenizer.decode([*prompt, *answer.tokens])
    assert "größer 日本" + answer.text == whole
    for event in answer.events[:-1]:
        assert not event.text.endswith("\ufffd")


def test_a_found_prefix_gives_the_same_answer(folder: str) -> None:
    loop, prompt = loop_of(folder), prompts_of(1, 5)[0] + [9] * 60
    params = SamplingParams(n_new=8, rules=GREEDY)
    first = ask(loop, [prompt], params)[0]
    second = ask(loop, [prompt], params)[0]
    assert first.tokens == second.tokens == by_transformers(folder, prompt, 8, eos_token_id=None)
    assert loop._engine.count_found(torch.tensor(prompt), "other") == 0
    assert loop._engine.count_found(torch.tensor(prompt)) == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("prompt", "n_new", "error", "says"),
    [
        ([], 3, ModelError, "0 tokens"),
        ([1], 0, ModelError, "0 are asked"),
        ([1, 299 + 10_000], 3, ModelError, "10299"),
        ([-1], 3, ModelError, "-1"),
        ([1] * 190, 11, SchedulingError, "201 tokens, and 200"),
        ([1] * 100, 14, SchedulingError, "114 tokens, and the memory of keys and values has room for 113"),
    ],
)
def test_a_wrong_request_is_refused_before_it_begins(
    folder: str, prompt: list[int], n_new: int, error: type[Exception], says: str
) -> None:
    loop = loop_of(folder, n_blocks=7)
    good = ask(loop, [[5, 6, 7]], SamplingParams(n_new=4, rules=GREEDY))[0].tokens
    with pytest.raises(error, match=says):
        loop.check(prompt, SamplingParams(n_new=n_new))
    assert ask(loop, [[5, 6, 7]], SamplingParams(n_new=4, rules=GREEDY))[0].tokens == good


def test_the_longest_request_runs_alone(folder: str) -> None:
    loop = loop_of(folder, n_blocks=7)
    assert loop.longest == 7 * BLOCK_TOKENS + 1
    prompts = [[1] * 100, [2] * 13, [3] * 40]
    answers = ask(loop, prompts, [SamplingParams(n_new=13), SamplingParams(n_new=100), SamplingParams(n_new=60)])
    assert [len(answer.tokens) for answer in answers] == [13, 100, 60]
    assert free_blocks(loop) == 7


class Faulty:
    """An engine whose ``put`` fails at some calls, before or behind the forward."""

    def __init__(self, engine: Any, at: set[int], behind: bool) -> None:
        self._engine, self._at, self._behind, self.n_puts = engine, at, behind, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def put(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.n_puts += 1
        if self.n_puts in self._at and not self._behind:
            raise RuntimeError("a planted fault")
        logits = self._engine.put(*args, **kwargs)
        return torch.full_like(logits, torch.nan) if self.n_puts in self._at else logits


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_failed_step_answers_its_requests_and_the_next_ones_run(folder: str, at: int) -> None:
    loop = loop_of(folder)
    prompts, params = prompts_of(4, 6), SamplingParams(n_new=8, rules=GREEDY)
    expected = [answer.tokens for answer in ask(loop, prompts, params)]
    loop._engine = Faulty(loop._engine, {at}, behind=False)
    failed = ask(loop, prompts, params)
    assert ["a planted fault" in str(answer.end) for answer in failed] == [True] * 4
    assert [answer.tokens for answer in ask(loop, prompts, params)] == expected
    assert (free_blocks(loop), loop.n_requests) == (40, 0)


def test_a_row_of_nan_ends_alone(folder: str) -> None:
    loop = loop_of(folder)
    prompts, params = prompts_of(3, 7), SamplingParams(n_new=8, rules=GREEDY)
    expected = [answer.tokens for answer in ask(loop, prompts, params)]
    put = loop._engine.put

    def with_nan(uids: list[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = put(uids, *args, **kwargs)
        if len(uids) == 3:
            logits[1, 3] = torch.nan
        return logits

    loop._engine.put = with_nan  # type: ignore[method-assign]
    answers = ask(loop, prompts, params)
    assert isinstance(answers[1].end, ModelError), answers[1].end
    assert [answers[0].tokens, answers[2].tokens] == [expected[0], expected[2]]
    assert free_blocks(loop) == 40


def test_a_sink_that_raises_ends_its_own_request(folder: str) -> None:
    loop, good = loop_of(folder), Answer()

    def bad(event: AnswerEvent) -> None:
        raise ValueError("a planted fault")

    loop.submit(loop.check([1, 2], SamplingParams(n_new=50)), bad)
    loop.submit(loop.check([3], SamplingParams(n_new=9)), good)
    loop.run_until(lambda: good.end is not None)
    assert (len(good.tokens), loop.n_requests, free_blocks(loop)) == (9, 0, 40)


def test_an_interrupt_ends_the_requests_and_the_loop_goes_on(folder: str) -> None:
    loop, answer = loop_of(folder), Answer()
    loop.submit(loop.check([1, 2], SamplingParams(n_new=50)), answer)
    n_calls = 0

    def interrupt() -> bool:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        loop.run_until(interrupt)
    assert isinstance(answer.end, StateError)
    assert len(ask(loop, [[3]], SamplingParams(n_new=9))[0].tokens) == 9
    assert free_blocks(loop) == 40


def run_in_thread(loop: RequestLoop) -> threading.Thread:
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    return thread


def test_requests_come_and_go_from_any_thread(folder: str) -> None:
    """A third is cancelled at any moment; what is left is what was there before."""
    loop = loop_of(folder, n_blocks=12)
    thread = run_in_thread(loop)
    rng, answers = random.Random(0), list[tuple[ServedRequest, Answer, threading.Event, int]]()
    lock = threading.Lock()

    def send(seed: int) -> None:
        mine = random.Random(seed)
        for prompt in prompts_of(50, seed, longest=30):
            done, answer = threading.Event(), Answer()

            def sink(event: AnswerEvent, answer: Answer = answer, done: threading.Event = done) -> None:
                answer(event)
                if event.reason is not None or event.error is not None:
                    done.set()

            n_new = mine.randrange(1, 12)
            request = loop.submit(loop.check(prompt, SamplingParams(n_new=n_new, seed=seed)), sink)
            if mine.random() < 1 / 3:
                loop.cancel(request)
                n_new = 0
            with lock:
                answers.append((request, answer, done, n_new))

    senders = [threading.Thread(target=send, args=(seed,)) for seed in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        waits.joined(sender)
    rng.shuffle(answers)
    for _, answer, done, n_new in answers:
        if n_new:
            waits.set_within(done)
            assert (len(answer.tokens), answer.end) == (n_new, FinishReason.LENGTH)
    loop.close()
    waits.joined(thread)
    assert (loop.n_requests, free_blocks(loop)) == (0, 12)


def test_a_closed_loop_answers_and_refuses(folder: str) -> None:
    loop, answer, begun = loop_of(folder), Answer(), threading.Event()

    def sink(event: AnswerEvent) -> None:
        answer(event)
        begun.set()

    thread = run_in_thread(loop)
    loop.submit(loop.check([1, 2], SamplingParams(n_new=190)), sink)
    waits.set_within(begun)
    loop.close()
    waits.joined(thread)
    assert answer.end is FinishReason.LENGTH or isinstance(answer.end, StateError)
    with pytest.raises(StateError, match="no requests any more"):
        loop.submit(loop.check([1], SamplingParams(n_new=1)), Answer())


def test_bias_and_penalties_are_those_of_the_formula(folder: str) -> None:
    """Greedy choices, each recomputed from the logits of transformers."""
    prompt = prompts_of(1, 8)[0]
    bias = ((3, 2.5), (7, -1.0), (250, 4.0))
    wish = SamplingParams(n_new=12, rules=GREEDY, logit_bias=bias, presence_penalty=0.7, frequency_penalty=0.9)
    found = ask(loop_of(folder), [prompt], wish)[0].tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected: list[int] = []
    for _ in range(12):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *expected]])).logits[0, -1][: len(byte_tokenizer())].double()
        for token, number in bias:
            logits[token] += number
        for token in set(expected):
            logits[token] -= 0.7 + 0.9 * expected.count(token)
        expected.append(int(logits.argmax()))
    assert found == expected
    assert found != ask(loop_of(folder), [prompt], SamplingParams(n_new=12, rules=GREEDY))[0].tokens


@pytest.mark.parametrize("n_top", [0, 1, 5, 10_000])
def test_log_probabilities_are_those_of_the_whole_distribution(folder: str, n_top: int) -> None:
    prompt, n_words = prompts_of(1, 9)[0], len(byte_tokenizer())
    wish = SamplingParams(n_new=6, rules=Rules(temperature=0.5, top_k=3), seed=1, n_top=n_top, logit_bias=((5, 9.0),))
    answer, silent = ask(loop_of(folder), [prompt, prompt], [wish, SamplingParams(n_new=6)])
    assert [(event.log_prob, event.top) for event in silent.events] == [(None, ())] * 6
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = list(prompt)
    for event in answer.events:
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0, -1][:n_words].double().log_softmax(-1)
        assert event.token is not None and event.log_prob is not None
        assert abs(event.log_prob - float(expected[event.token])) < 1e-4
        assert len(event.top) == min(n_top, n_words)
        values, _ = expected.topk(len(event.top))
        torch.testing.assert_close(
            torch.tensor([number for _, number in event.top], dtype=torch.float64), values, atol=1e-4, rtol=0
        )
        tokens.append(event.token)


def test_a_bias_of_a_token_that_there_is_not_is_refused(folder: str) -> None:
    n_words = len(byte_tokenizer())
    with pytest.raises(ModelError, match=f"{n_words} of logit_bias"):
        loop_of(folder).check([1], SamplingParams(n_new=1, logit_bias=((n_words, 1.0),)))


class EvenThenEnd:
    """A form: so many even tokens, and then the end token."""

    def __init__(self, n: int, end: int) -> None:
        self.n, self.end, self.taken = n, end, list[int]()

    def mask(self, logits: torch.Tensor) -> None:
        allowed = (
            torch.arange(len(logits)) % 2 == 0 if len(self.taken) < self.n else torch.arange(len(logits)) == self.end
        )
        logits[~allowed] = -torch.inf

    def accept(self, token: int) -> None:
        self.taken.append(token)


def test_a_grammar_shapes_its_own_request_alone(folder: str) -> None:
    form, prompts = EvenThenEnd(5, 9), prompts_of(2, 10)
    plain = SamplingParams(n_new=8, rules=GREEDY)
    shaped = SamplingParams(n_new=8, rules=GREEDY, grammar=form, ends=frozenset([9]))
    loop = loop_of(folder)
    answers = ask(loop, prompts, [shaped, plain])
    assert answers[0].end is FinishReason.STOP
    assert answers[0].tokens == form.taken and form.taken[-1] == 9 and len(form.taken) == 6
    assert all(token % 2 == 0 for token in form.taken[:-1])
    expected = by_transformers(folder, prompts[1], 8, eos_token_id=None)
    assert answers[1].tokens == expected


@pytest.mark.parametrize("method", ["mask", "accept"])
def test_a_grammar_that_fails_ends_its_own_request_alone(folder: str, method: str) -> None:
    form, prompts = EvenThenEnd(5, 9), prompts_of(2, 10)

    def fail(*args: Any) -> None:
        raise RuntimeError("a planted fault")

    setattr(form, method, fail)
    plain = SamplingParams(n_new=8, rules=GREEDY)
    loop = loop_of(folder)
    answers = ask(loop, prompts, [SamplingParams(n_new=8, rules=GREEDY, grammar=form), plain])
    assert "planted" in str(answers[0].end)
    assert answers[1].tokens == by_transformers(folder, prompts[1], 8, eos_token_id=None)
    assert (loop.n_requests, free_blocks(loop)) == (0, 40)
