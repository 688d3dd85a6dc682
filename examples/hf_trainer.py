"""Trains a small Llama on the Python standard library's source with transformers.Trainer. To start it:

    deepspeed_c --num_procs 2 examples/hf_trainer.py --deepspeed examples/ds_hf_stage2.json
    deepspeed_c --num_procs 2 examples/hf_trainer.py --deepspeed examples/ds_hf_stage3.json --resume
    deepspeed_c --num_procs 2 examples/hf_trainer.py --deepspeed examples/ds_hf_stage3.json \
        --model_path out/hf/model --lora 8 --output_dir out/hf_lora

The script also takes all arguments of transformers.TrainingArguments. Two lines before the import of transformers make
it run on deepspeed_c. ``deepspeed_c run`` starts a script without such a change.
"""

from __future__ import annotations

import deepspeed_c

deepspeed_c.install_as_deepspeed()

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from text import Windows, bits, spread, standard_library, unigram_entropy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.trainer_utils import get_last_checkpoint

EVAL_WINDOWS = 256


@dataclass
class Script:
    """The arguments of this script in addition to the training arguments."""

    model_path: str | None = field(default=None, metadata={"help": "a saved model to start from; default: a new one"})
    layers: int = field(default=4, metadata={"help": "of a new model"})
    width: int = field(default=256, metadata={"help": "of a new model"})
    context: int = field(default=128, metadata={"help": "bytes that the model sees at once"})
    lora: int = field(default=0, metadata={"help": "rank of LoRA adapters to train instead of the model; 0: none"})
    resume: bool = field(default=False, metadata={"help": "go on from the last checkpoint in output_dir"})
    lib_bytes: int = field(default=8 << 20, metadata={"help": "how much of the standard library is read, bytes"})


class Bytes(Dataset):
    """Windows of text as inputs for a causal language model of transformers: one token is one byte."""

    def __init__(self, windows: Windows, n: int | None = None) -> None:
        self.windows, self.chosen = windows, spread(windows, n or len(windows))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = self.windows[self.chosen[i]].long()
        return {"input_ids": tokens, "labels": tokens}  # the model shifts the labels


def main() -> None:
    script, args = parse_arguments()
    set_seed(args.seed)
    train_text, held_out_text = standard_library(script.lib_bytes)

    # The training arguments must exist before the model: under stage 3 each rank then makes or reads only its own shard
    # of the model.
    model = make_model(script)
    if script.lora:
        model = add_lora(model, script.lora)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Bytes(Windows(train_text, script.context)),
        eval_dataset=Bytes(Windows(held_out_text, script.context), EVAL_WINDOWS),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir) if script.resume else None)
    loss = trainer.evaluate()["eval_loss"]
    folder = Path(args.output_dir) / "model"
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        byte_tokenizer().save_pretrained(str(folder))
        entropy = unigram_entropy(held_out_text)
        print(f"held-out loss   {loss:.3f} nats/byte ({bits(loss):.3f} bits/byte)")
        print(f"unigram entropy {entropy:.3f} nats/byte: the loss is {loss / entropy:.2f} of it")
        print(f"model: {folder}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token i is byte i, so that programs that take text can run the model."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_model(script: Script) -> PreTrainedModel:
    if script.model_path:
        return AutoModelForCausalLM.from_pretrained(script.model_path)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=256,
            hidden_size=script.width,
            intermediate_size=script.width * 11 // 4,
            num_hidden_layers=script.layers,
            num_attention_heads=max(1, script.width // 64),
            num_key_value_heads=max(1, script.width // 64),
            max_position_embeddings=script.context + 1,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def add_lora(model: PreTrainedModel, rank: int) -> torch.nn.Module:
    """Return the model with adapters beside its linear layers; only the adapters are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def last_checkpoint(folder: str) -> str:
    found = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if found is None:
        sys.exit(f"--resume: there is no checkpoint in {folder}")
    return found


def parse_arguments() -> tuple[Script, TrainingArguments]:
    parser = HfArgumentParser((Script, TrainingArguments), description=__doc__.splitlines()[0])
    has_gpu = torch.cuda.is_available()
    parser.set_defaults(
        output_dir="out/hf",
        max_steps=100,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        warmup_steps=10,
        weight_decay=0.1,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        bf16=has_gpu,  # a CPU without AVX-512 multiplies bf16 many times more slowly than fp32
        use_cpu=not has_gpu,
        report_to="none",
        disable_tqdm=True,
    )
    return parser.parse_args_into_dataclasses()


if __name__ == "__main__":
    try:
        main()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
