"""trl on deepspeed_c: supervised fine-tuning, preference optimisation with a reference model, and generation with
gathered parameters, with and without sharding.
"""

from __future__ import annotations

import pytest
import torch

from tests import training
from tests.hf.stack import LEARNING_RATE, ds_config, forget, llama, numbers, on_ranks

WORDS = ["a", "b", "c", "d", "e", "f"]


def tokenizer():
    """A tokenizer of single letters. trl needs a tokenizer, and the tests download nothing."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokens = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokens.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def rows(n=32):
    generator = torch.Generator().manual_seed(3)
    return ["".join(WORDS[i] for i in torch.randint(0, len(WORDS), (6,), generator=generator)) for _ in range(n)]


def settings(kind, folder, deepspeed, **changes):
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": LEARNING_RATE,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": 7,
        "deepspeed": deepspeed,
    }
    return kind(**{**given, **changes})


def sft(rank, world, folder, deepspeed):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    forget()
    args = settings(SFTConfig, folder, deepspeed, max_length=16)
    data = Dataset.from_dict({"text": rows()})
    trainer = SFTTrainer(model=llama(), args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return numbers(trainer)


@pytest.mark.parametrize("stage", [2, 3])
def test_supervised_fine_tuning(tmp_path, stage):
    found = on_ranks(2, sft, tmp_path, ds_config(stage, scheduler=False))[0]
    expected = on_ranks(2, sft, tmp_path, None)[0]
    print(found, expected)
    assert found["loss"] == pytest.approx(expected["loss"], rel=5e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def dpo(rank, world, folder, deepspeed, how):
    from datasets import Dataset, load_from_disk
    from trl import DPOConfig, DPOTrainer

    forget()
    text = rows(48)
    made = Dataset.from_dict(
        {"prompt": [t[:3] for t in text], "chosen": [t[3:] for t in text], "rejected": [t[:2:-1] for t in text]}
    )
    if rank == 0:
        made.save_to_disk(folder / "data")
    torch.distributed.barrier()
    data = load_from_disk(
        folder / "data"
    )  # with files, so that one rank computes the reference's log probabilities for all ranks
    args = settings(DPOConfig, folder, deepspeed, max_length=16, precompute_ref_log_probs=how == "precomputed")
    reference = llama(seed=9) if how == "reference" else None
    trainer = DPOTrainer(
        model=llama(), ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer()
    )
    if reference is not None and deepspeed is not None:
        engine, is_sharded = trainer.ref_model, deepspeed["zero_optimization"]["stage"] == 3
        assert engine.zero_optimization_stage() == (3 if is_sharded else 0)
        assert (engine.optimizer is None) == (not is_sharded) and not hasattr(engine.optimizer, "param_groups")
    trainer.train()
    return numbers(trainer)


@pytest.mark.parametrize("stage, how", [(2, "reference"), (3, "reference"), (2, "precomputed"), (3, "precomputed")])
def test_preferences(tmp_path, stage, how):
    found = on_ranks(2, dpo, tmp_path / "a", ds_config(stage, scheduler=False), how)[0]
    expected = on_ranks(2, dpo, tmp_path / "b", None, how)[0]
    print(found, expected)
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)


def generate(rank, world, stage):
    """Trains a step, generates text by trl's function, and trains a second step.

    The second step equals the step without generation.
    """
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from trl.models.utils import unwrap_model_for_generation
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    from tests.hf.stack import Text

    results = []
    for generates in (False, True):
        forget()
        config = training.config(stage, None, rows=2, zero={"stage3_param_persistence_threshold": 40})
        PartialState(cpu=True)
        acc = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = llama()
        engine, _ = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
        losses, written = [], []
        for step in range(2):
            loss = engine(**Text().batch(2 * step, 2 * step + 2)).loss
            acc.backward(loss)
            losses.append(loss.item())
            if generates:
                n_hooks = hooks_of(model)
                with unwrap_model_for_generation(engine, acc) as plain, torch.no_grad():
                    assert plain is model and (hooks_of(plain) == 0 or stage < 3)
                    written.append(greedy(plain, 3 + rank))
                    assert written[-1] == greedy(twin_of(plain), 3 + rank)
                assert hooks_of(model) == n_hooks and is_learnt(engine) is (None if stage < 3 else False)
                with maybe_gather_lm_head_ctx(model.lm_head.weight, model.lm_head.weight, None):
                    assert model.lm_head.weight.shape == (61, 32)
        losses.append(engine(**Text().batch(0, 2)).loss.item())
        assert is_learnt(engine) is (None if stage < 3 else world > 1)
        results.append((losses, written))
        acc.free_memory()
    return results


def greedy(model, n_tokens):
    """The model's greedy continuation of a short prompt."""
    from tests.hf.stack import Text

    prompt = Text().batch(0, 1)["input_ids"][:, :4]
    return model.generate(prompt, max_new_tokens=n_tokens, do_sample=False).tolist()


def twin_of(model):
    """A plain model with the same weights, gathered."""
    twin = llama()
    twin.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return twin


def is_learnt(engine):
    """Whether the engine has recorded the order of use from which it plans gathers. None if it plans no gathers."""
    if not hasattr(engine.optimizer, "parameter_offload"):
        return None
    return not engine.optimizer.parameter_offload.param_coordinator.is_invalid_trace()


def hooks_of(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("world, stage", [(1, 3), (2, 2), (2, 3)])
def test_generation_between_steps(world, stage):
    found = on_ranks(world, generate, stage)
    for (without, _), (losses, _) in found:
        assert losses == without
    tokens = [written for _, (_, written) in found]
    for step in range(2):
        assert (
            tokens[0][step][0] == tokens[-1][step][0][: len(tokens[0][step][0])]
        )  # greedy: the longer text begins with the shorter


def generate_with_teacher(rank, world):
    """A teacher that trl has prepared without an optimizer.

    The teacher is evaluated, generates text by two functions of trl, and is evaluated again.
    """
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from trl.models.utils import prepare_deepspeed, unwrap_model_for_generation

    from tests.hf.stack import Text

    forget()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    PartialState(cpu=True)
    acc = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model, twin = llama(seed=9), llama(seed=9).eval()
    teacher = prepare_deepspeed(model, acc)
    n_hooks, losses, written = hooks_of(model), [], []
    assert n_hooks > 0 and model.lm_head.weight.ds_status.name == "NOT_AVAILABLE"
    for n_tokens in (3 + rank, 5 - rank):
        with torch.no_grad():
            losses.append(teacher(**Text().batch(0, 2)).loss.item())
            with unwrap_model_for_generation(teacher, acc) as plain:
                written.append((greedy(plain, n_tokens), greedy(twin, n_tokens)))
            with unwrap_model_for_generation(teacher, acc, gather_deepspeed3_params=False) as plain:
                assert plain is model and hooks_of(model) == n_hooks
                written.append((greedy(plain, 4), greedy(twin, 4)))
        assert hooks_of(model) == n_hooks and model.lm_head.weight.ds_status.name == "NOT_AVAILABLE"
    with torch.no_grad():
        return losses, twin(**Text().batch(0, 2)).loss.item(), written


def test_a_teacher_without_an_optimizer_generates():
    for losses, expected, written in on_ranks(2, generate_with_teacher):
        assert losses == pytest.approx([expected] * 2, rel=1e-6)
        for found, plain in written:
            assert found == plain


def online(rank, world, folder, deepspeed, how, gathers):
    """Steps of training on text that the model has just written, and that a function rewards."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    forget()
    writer = tokenizer()
    made = {
        "args": {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "ds3_gather_for_generation": gathers},
        "reward_funcs": lambda completions, **_: [text.count("a") / 8 for text in completions],
        "train_dataset": Dataset.from_dict({"prompt": [text[:3] for text in rows()]}),
        "processing_class": writer,
    }
    small = {"vocab_size": len(writer)}
    if how == "grpo":
        if rank == 0:
            llama(**small).save_pretrained(folder / "model")  # the trainer reads the reference from there
        torch.distributed.barrier()
        sizes = {
            "num_generations": 4,
            "max_completion_length": 8,
            "beta": 0.1,
            "model_init_kwargs": {"dtype": "float32"},
        }
        args = settings(GRPOConfig, folder, deepspeed, **made.pop("args"), **sizes)
        trainer = GRPOTrainer(model=str(folder / "model"), args=args, **made)
    else:
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        sizes = {"max_new_tokens": 8, "max_length": 16, "missing_eos_penalty": None}
        args = settings(OnlineDPOConfig, folder, deepspeed, **made.pop("args"), **sizes)
        trainer = OnlineDPOTrainer(model=llama(**small), ref_model=llama(seed=9, **small), args=args, **made)
    trainer.train()
    name = "reward" if how == "grpo" else "objective/scores"
    return numbers(trainer)["loss"], [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("how", ["grpo", "online dpo"])
def test_training_on_text_of_the_model_itself(tmp_path, how):
    expected = on_ranks(2, online, tmp_path / "plain", None, how, True)[0]
    assert len(set(expected[1])) > 1, "rewards change"
    for stage, gathers in ((2, True), (3, True), (3, False)):
        config = ds_config(stage, scheduler=False)
        found = on_ranks(2, online, tmp_path / f"{stage}{gathers}", config, how, gathers)[0]
        print(how, stage, gathers, found, expected)
        assert found[1] == pytest.approx(expected[1], abs=1e-6), "the same text"
        assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
