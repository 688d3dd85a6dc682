"""``generate`` of cut models with candidates: the tokens of whole logits and of transformers, and the calls that need
whole logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_c
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.config.parallel import TensorParallel
from deepspeed_c.errors import StateError
from deepspeed_c.inject import cut_model
from deepspeed_c.inject.candidates import Choice
from deepspeed_c.inject.decoding import choice_of
from tests.cells import cells, every
from tests.deepspeed_c.inference.models import GENERATING, like_bart, padded_prompts, require_same_tokens
from tests.deepspeed_c.inject import families
from tests.ranks import on_ranks, run_ranks

pytest.importorskip("transformers")

PRELOAD = "tests.deepspeed_c.inject.preload"
N_NEW, N_ROWS = 5, 2
SCALED = ("cohere", "granite")  # their forwards scale the layer's logits
# The number of columns that a rank sends of each row.
HOW = {
    "greedy": ({"do_sample": False}, 1),
    "top-k": ({"do_sample": True, "top_k": 3}, 4),
    "top-k of 1": ({"do_sample": True, "top_k": 1}, 2),
    "top-k and more": ({"do_sample": True, "top_k": 4, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01}, 5),
    "normalized": ({"do_sample": True, "top_k": 2, "renormalize_logits": True}, 3),
}


def same(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that changes nothing. No package knows it, so it gets whole logits."""
    assert bool(scores.isfinite().all()), scores
    return scores


def messages(comm: Collectives, since: int) -> dict[str, list[int]]:
    """Bytes of the gathers of logits since the entry of this number."""
    found: dict[str, list[int]] = {"candidates": [], "output": []}
    for entry in comm.ledger.recent(512):
        kind = entry.label.partition(" of ")[0]
        if entry.seq > since and entry.op == "all-gather" and entry.n_bytes and kind in found:
            found[kind].append(entry.n_bytes)
    return found


def generate(model: Any, comm: Collectives, seed: int = 5, **how: Any) -> tuple[Any, dict[str, list[int]]]:
    since = comm.ledger.last
    torch.manual_seed(seed)
    prompts = how.pop("prompts", None) or padded_prompts()
    with torch.no_grad():
        tokens = model.generate(**prompts, max_new_tokens=N_NEW, min_new_tokens=None, **how)
    return tokens, messages(comm, since)


def family_body(rank: int, world: int, family: str) -> list[str]:
    plain, config = families.make(family).eval(), {"dtype": "fp32", "tensor_parallel": {"tp_size": world}}
    lines = []
    with deepspeed_c.init_inference(families.make(family), config) as engine:
        comm = Collectives() if world == 1 else engine.module.get_output_embeddings().ranks.comm
        for number, (name, (how, n_sent)) in enumerate(HOW.items()):
            tokens, sent = generate(engine, comm, **how)
            whole, sent_whole = generate(engine, comm, **how, logits_processor=[same])
            assert torch.equal(tokens, whole), (name, tokens, whole)
            torch.manual_seed(5)
            wanted = plain.generate(
                **padded_prompts(), max_new_tokens=N_NEW, **how, return_dict_in_generate=True, output_scores=True
            )
            if how["do_sample"]:
                assert torch.equal(tokens, wanted.sequences), (name, tokens, wanted.sequences)
            else:
                require_same_tokens(type(wanted)(sequences=tokens), wanted)
            if world == 1:
                assert not any(sent.values()), sent
                continue
            n_steps = len(wanted.scores)
            assert not sent_whole["candidates"] and len(sent_whole["output"]) == n_steps, (name, sent_whole)
            if family in SCALED or n_sent * 8 >= -(-families.VOCAB // world) * 4:
                assert not sent["candidates"] and len(sent["output"]) == n_steps, (name, sent)
                continue
            # The first forward of all proves that the model returns the layer's logits.
            assert len(sent["output"]) == (number == 0), (name, sent)
            assert len(sent["candidates"]) == n_steps - (number == 0), (name, sent)
            limit = 2 * world * max(how.get("top_k", 1), 1) * (4 + 8) * N_ROWS
            assert all(n == world * N_ROWS * n_sent * 8 <= limit for n in sent["candidates"]), (name, sent, limit)
            lines.append(f"{name}: {sent['candidates']}")
    return lines


@pytest.mark.parametrize("family", every(2, [*GENERATING, *SCALED, "llama4"]))
def test_tokens_on_two_ranks(family: str) -> None:
    results = run_ranks(2, family_body, family, preload=PRELOAD)
    assert all(lines == results[0] for lines in results), results
    assert bool(results[0]) == (family not in SCALED), results[0]


@pytest.mark.parametrize(("family", "world"), cells(("llama", "gpt2", "falcon_7b"), (1, 3, 4), at_once=1))
def test_tokens_on_other_numbers_of_ranks(family: str, world: int) -> None:
    run_ranks(world, family_body, family, preload=PRELOAD)


def cut_llama(**settings: Any) -> tuple[torch.nn.Module, Collectives]:
    model = families.make("llama").eval()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    comm = Collectives()
    cut_model(model, TensorParallel(), comm)
    return model, comm


def whole_calls() -> dict[str, dict[str, Any]]:
    """Calls whose tokens depend on logits that are no candidates, or that return logits."""
    import transformers as t

    drafter = families.make("llama").eval()
    top_k = {"do_sample": True, "top_k": 3}
    return {
        "beams": {"num_beams": 2},
        "sampled beams": {"num_beams": 2, **top_k},
        "all columns": {"do_sample": True, "top_k": 0},
        "top-h, which comes before top-k": {**top_k, "top_h": 0.4},
        "repetition": {"repetition_penalty": 1.7},
        "repetition, sampled": {"repetition_penalty": 1.7, **top_k},
        "n-grams": {"no_repeat_ngram_size": 1},
        "bad words": {"bad_words_ids": [[i] for i in range(3, 60)]},
        "suppressed": {"suppress_tokens": list(range(3, 60))},
        "suppressed first": {"begin_suppress_tokens": list(range(3, 60))},
        "bias": {"sequence_bias": {(7,): 5.0}},
        "shortest": {"min_length": 12},
        "forced end": {"forced_eos_token_id": 9},
        "forced begin": {"forced_bos_token_id": 9},
        "allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [11, 12, 13]},
        "invalid values": {"remove_invalid_values": True},
        "watermark": {"watermarking_config": t.WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
        "guidance": {"guidance_scale": 1.5},
        "a processor": {"logits_processor": [lambda ids, scores: scores.roll(1, -1)]},
        "a temperature before the largest": {"logits_processor": [t.TemperatureLogitsWarper(2.0)]},
        "scores": {"return_dict_in_generate": True, "output_scores": True},
        "logits": {"return_dict_in_generate": True, "output_logits": True},
        "a drafting model": {"assistant_model": drafter},
        "a prompt as draft": {"prompt_lookup_num_tokens": 2},
        "another loop": {"custom_generate": t.GenerationMixin._sample},
    }


def whole_body(rank: int, world: int) -> list[str]:
    plain = families.make("llama").eval()
    model, comm = cut_llama()
    _, sent = generate(model, comm, do_sample=False)
    assert len(sent["candidates"]) == N_NEW - 1, sent
    one = {key: value[1:] for key, value in padded_prompts().items()}  # drafts are made of one prompt
    for name, how in whole_calls().items():
        how = {"do_sample": False, **how}
        prompts = one if "draft" in name else padded_prompts()
        tokens, sent = generate(model, comm, **how, prompts=prompts)
        torch.manual_seed(5)
        wanted = plain.generate(**prompts, max_new_tokens=N_NEW, **how)
        ours, theirs = (x if torch.is_tensor(x) else x.sequences for x in (tokens, wanted))
        assert torch.equal(ours, theirs), (name, ours, theirs)
        for which in ("scores", "logits") if not torch.is_tensor(tokens) else ():
            for mine, other in zip(getattr(tokens, which) or (), getattr(wanted, which) or (), strict=True):
                assert torch.allclose(mine, other, atol=1e-4), (name, mine, other)
        assert sent["output"] and not sent["candidates"], (name, sent)
    return list(whole_calls())


def test_calls_that_need_whole_logits_get_them() -> None:
    for names in run_ranks(2, whole_body, preload=PRELOAD):
        assert len(names) == len(whole_calls())


@on_ranks(2, preload=PRELOAD)
def test_readers_of_logits_get_whole_ones(rank: int, world: int) -> None:
    model, comm = cut_llama()
    head = model.get_output_embeddings()
    usual, _ = generate(model, comm, do_sample=False)
    _, sent = generate(model, comm, do_sample=False)
    assert not sent["output"] and len(sent["candidates"]) == N_NEW, sent
    seen: list[torch.Tensor] = []

    def read_layer(module: Any, args: Any, output: Any) -> None:
        seen.append(output)

    def read_model(module: Any, args: Any, output: Any) -> None:
        seen.append(output.logits)

    def read_forward(*args: Any, **kwargs: Any) -> Any:
        output = type(model).forward(model, *args, **kwargs)
        seen.append(output.logits)
        return output

    def count(text: str) -> None:
        tokens, sent = generate(model, comm, do_sample=False)
        assert torch.equal(tokens, usual) and not sent["candidates"], (text, tokens, usual, sent)

    # One rank alone that reads makes all ranks gather whole logits.
    for module, hook in ((head, read_layer), (model, read_model)):
        for readers in (range(world), [world - 1]):
            handle = module.register_forward_hook(hook) if rank in readers else None
            count(f"{hook.__name__} on ranks {list(readers)}")
            if handle is not None:
                assert len(seen) == N_NEW and all(bool(x.isfinite().all()) for x in seen), seen
                seen.clear()
                handle.remove()
    model.__dict__["forward"] = read_forward
    count("a forward of the instance")
    assert len(seen) == N_NEW and all(bool(x.isfinite().all()) for x in seen), seen
    seen.clear()
    del model.__dict__["forward"]
    tokens, sent = generate(model, comm, do_sample=False)
    assert not sent["output"] and len(sent["candidates"]) == N_NEW and torch.equal(tokens, usual), sent

    class Asks:
        """A stopping criterion that calls the model, and lets it generate."""

        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            assert bool(model(input_ids=ids).logits.isfinite().all())
            seen.append(model.generate(ids, max_new_tokens=2, do_sample=False))
            return torch.zeros(len(ids), dtype=torch.bool)

    from transformers import StoppingCriteriaList

    tokens, sent = generate(model, comm, do_sample=False, stopping_criteria=StoppingCriteriaList([Asks()]))
    assert torch.equal(tokens, usual) and len(seen) == N_NEW, (tokens, usual)
    # Each step has one forward of the loop, one of the criterion, and two of the generation within it.
    assert len(sent["output"]) == N_NEW and len(sent["candidates"]) == 3 * N_NEW, sent
    for name in ("_get_logits_processor", "prepare_inputs_for_generation"):
        assert name not in model.__dict__, name
    assert bool(model(**padded_prompts()).logits.isfinite().all())


def failing_body(rank: int, world: int) -> str:
    model, comm = cut_llama()
    usual, _ = generate(model, comm, do_sample=False)

    class Fails:
        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            raise KeyError("stop")

    from transformers import StoppingCriteriaList

    try:
        generate(model, comm, do_sample=False, stopping_criteria=StoppingCriteriaList([Fails()]))
    except KeyError:
        pass
    assert "prepare_inputs_for_generation" not in model.__dict__ and model.get_output_embeddings().candidates is None
    assert bool(model(**padded_prompts()).logits.isfinite().all())
    tokens, sent = generate(model, comm, do_sample=False)
    assert torch.equal(tokens, usual) and not sent["output"], sent
    # The forward begins to change its logits after the proof, in a way that hooks do not show.
    kind = type(model)
    own = kind.forward

    def capped(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.logits = output.logits.neg().mul_(1)  # another tensor, of the same version
        return output

    kind.forward = capped
    try:
        generate(model, comm, do_sample=False)
        return "no error"
    except StateError as error:
        negated, sent = generate(model, comm, do_sample=False)
        assert not sent["candidates"] and not torch.equal(negated, usual), (negated, usual)
        return str(error)
    finally:
        kind.forward = own


def test_a_forward_that_changes_after_the_proof_is_an_error_and_then_whole() -> None:
    for text in run_ranks(2, failing_body, preload=PRELOAD):
        assert "has changed the logits of its output layer" in text and "call generate again" in text, text


@on_ranks(2, preload=PRELOAD)
def test_a_bias_after_the_layer_needs_whole_logits(rank: int, world: int) -> None:
    plain, model, comm = like_bart("marian"), like_bart("marian"), Collectives()
    for one in (plain, model):
        one.final_logits_bias[0, 50:] = 3.0
    cut_model(model, TensorParallel(), comm)
    tokens, sent = generate(model, comm, do_sample=False)
    wanted = plain.generate(**padded_prompts(), max_new_tokens=N_NEW, do_sample=False)
    assert torch.equal(tokens, wanted), (tokens, wanted)
    assert not sent["candidates"] and sent["output"], sent


@on_ranks(2, preload=PRELOAD)
def test_other_ways_to_generate(rank: int, world: int) -> None:
    """A call in inference mode, in 16 bits, of a batch of tied logits, of an adapter's model, and without a cache."""
    import peft

    model, comm = cut_llama()
    with torch.inference_mode():
        usual, sent = generate(model, comm, do_sample=False)
        again, sent_again = generate(model, comm, do_sample=False, use_cache=False)
    assert torch.equal(usual, again) and len(sent["output"]) == 1 and not sent_again["output"], (sent, sent_again)
    assert len(sent_again["candidates"]) == N_NEW

    for dtype in (torch.bfloat16, torch.float16):
        model, comm = cut_llama()
        model.to(dtype)
        for how in ({"do_sample": False}, {"do_sample": True, "top_k": 3}):
            tokens, sent = generate(model, comm, **how)
            whole, _ = generate(model, comm, **how, logits_processor=[same])
            assert torch.equal(tokens, whole) and sent["candidates"], (dtype, how, tokens, whole, sent)

    # All logits are 0, so all are ties. (With equal rows they are not on every processor: a matrix product may add up the
    # last columns in another order.)
    tied = families.make("llama").eval()
    with torch.no_grad():
        tied.lm_head.weight.zero_()
    comm = Collectives()
    cut_model(tied, TensorParallel(), comm)
    generate(tied, comm, do_sample=False)
    tokens, sent = generate(tied, comm, do_sample=False, eos_token_id=None)
    assert not sent["output"] and bool((tokens[:, -N_NEW:] == 0).all()), (tokens, sent)
    tokens, sent = generate(tied, comm, do_sample=True, top_k=2, eos_token_id=None)
    whole, _ = generate(tied, comm, do_sample=True, top_k=2, eos_token_id=None, logits_processor=[same])
    assert torch.equal(tokens, whole) and len(sent["candidates"]) == len(sent["output"]) == N_NEW, (tokens, whole, sent)

    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = [peft.get_peft_model(families.make("llama"), config).eval() for _ in range(2)]
    adapted[1].load_state_dict(adapted[0].state_dict())
    comm = Collectives()
    cut_model(adapted[1], TensorParallel(), comm)
    tokens, sent = generate(adapted[1], comm, do_sample=False)
    wanted = adapted[0].generate(**padded_prompts(), max_new_tokens=N_NEW, do_sample=False)
    assert torch.equal(tokens, wanted) and len(sent["candidates"]) == N_NEW - 1, (tokens, wanted, sent)


@on_ranks(2, preload=PRELOAD)
def test_settings_of_the_model_and_of_ranks_that_differ(rank: int, world: int) -> None:
    """Settings come from the model's own generation configuration too."""
    model, comm = cut_llama(do_sample=True, top_k=3)
    generate(model, comm)
    _, sent = generate(model, comm)
    assert not sent["output"] and sent["candidates"], sent
    model, comm = cut_llama(repetition_penalty=1.5)
    generate(model, comm)
    _, sent = generate(model, comm)
    assert sent["output"] and not sent["candidates"], sent
    # Each rank asks for other candidates; the ranks then gather whole logits, and do not wait for one another.
    model, comm = cut_llama()
    generate(model, comm, do_sample=False)
    model.generation_config.do_sample, model.generation_config.top_k = True, 1 + rank
    _, sent = generate(model, comm)
    assert sent["output"] and not sent["candidates"], sent


def test_the_choice_that_processors_leave() -> None:
    import transformers as t

    class Colder(t.TemperatureLogitsWarper):
        pass

    warm, top, other = t.TemperatureLogitsWarper(0.5), t.TopKLogitsWarper(7), t.TopPLogitsWarper(0.5)
    assert choice_of([], is_sampling=False) == Choice(0)
    for processors in ([other], [warm], [Colder(0.5)], [other, top], [warm, other, top], [Colder(0.5), top]):
        assert choice_of(processors, is_sampling=False) is None, processors
        assert choice_of(processors, is_sampling=True) is None, processors
    assert choice_of([], is_sampling=True) is None
    for processors in ([top], [warm, top], [warm, warm, top, other]):
        choice = choice_of(processors, is_sampling=True)
        assert choice is not None and choice.n_best == 7, choice
        logits = torch.tensor([3.0, -1.0])
        for scale in choice.scales:
            logits = scale(logits)
        n_warm = processors.count(warm)
        assert torch.equal(logits, torch.tensor([3.0, -1.0]) * 2**n_warm), (logits, n_warm)
