"""Distil a small Llama on its own text (on-policy distillation, arXiv 2306.13649). To start it:

    deepspeed_c --num_procs 2 examples/opd_tiny.py

A teacher first learns the Python standard library's own source, byte by byte. Then a smaller student, which never sees
that text, writes lines after prompts from it. The teacher scores each byte that the student wrote, and the student
learns the teacher's distributions there. Both are made from configurations and sharded at ZeRO stage 3. One token is
one byte, and a line ends an answer, so answers have different lengths.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import torch
from text import as_tensor, standard_library
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_c as deepspeed
from deepspeed_c.distill import generalized_jsd_loss
from deepspeed_c.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout

VOCAB, PAD, END = 256, 0, ord("\n")  # no source has byte 0


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(args.seed)
    text = as_tensor(standard_library(args.text_bytes)[0]).long()
    with closing(Distiller(args, text)) as distiller:
        distiller.teach()
        for n in range(args.rounds):
            distiller.round(n)
        distiller.report()


def llama(args: argparse.Namespace, layers: int, width: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=args.prompt_bytes + args.new_bytes,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=END,
        )
    )


class Distiller:
    """The engines of student and teacher, and the losses so far."""

    def __init__(self, args: argparse.Namespace, text: torch.Tensor) -> None:
        self.args, self.text = args, text
        config = {
            "train_micro_batch_size_per_gpu": args.batch,
            "zero_optimization": {"stage": args.stage},
            "optimizer": {"type": "Adam", "params": {"lr": args.lr}},
            "gradient_clipping": 1.0,
        }
        teacher = llama(args, 2 * args.layers, args.width)
        student = llama(args, args.layers, args.width // 2)
        self.teacher, *_ = deepspeed.initialize(model=teacher, config=config)
        self.student, *_ = deepspeed.initialize(model=student, config={**config, "hybrid_engine": {"enabled": True}})
        tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)
        self.rollout = build_rollout(RolloutConfig(), student_engine=self.student, tokenizer=tokenizer)
        self.rank = torch.distributed.get_rank()
        self.random = torch.Generator().manual_seed(self.rank)
        self.losses: list[float] = []  # each round's loss of a byte, mean over ranks
        self.sample = ""

    def pieces(self, n: int, n_bytes: int) -> torch.Tensor:
        """Pieces [n, n_bytes] of the text. Each rank draws its own."""
        begins = torch.randint(len(self.text) - n_bytes, (n, 1), generator=self.random)
        return self.text[begins + torch.arange(n_bytes)]

    def teach(self) -> None:
        """Trains the teacher on the text."""
        n_bytes = self.args.prompt_bytes + self.args.new_bytes
        for _ in range(self.args.teacher_steps):
            tokens = self.pieces(self.args.batch, n_bytes).to(self.teacher.device)
            loss = self.teacher(input_ids=tokens, labels=tokens).loss
            self.teacher.backward(loss)
            self.teacher.step()
        self.teacher.eval()
        self.say(f"teacher: {loss.item():.2f} nats a byte")

    def round(self, n: int) -> None:
        """The student writes, the teacher scores, the student learns."""
        prompts = self.pieces(self.args.batch // self.args.samples, self.args.prompt_bytes)
        sampling = SamplingConfig(max_new_tokens=self.args.new_bytes, n_samples_per_prompt=self.args.samples)
        request = RolloutRequest(prompts.to(self.student.device), torch.ones_like(prompts).to(self.student.device))
        batch = self.rollout.generate(request, sampling)
        tokens, mask = batch.input_ids, batch.attention_mask
        written = slice(self.args.prompt_bytes - 1, -1)  # logits of one place are about the next one
        with torch.no_grad():
            wanted = self.teacher(input_ids=tokens, attention_mask=mask).logits[:, written]
        ids = None
        if self.args.top_k:  # a teacher on another machine would send no more
            wanted, ids = wanted.topk(self.args.top_k)
        found = self.student(input_ids=tokens, attention_mask=mask).logits[:, written]
        labels = tokens.masked_fill(mask == 0, -100)[:, self.args.prompt_bytes :]
        loss = generalized_jsd_loss(found, wanted, labels, self.args.beta, teacher_indices=ids)
        self.student.backward(loss)
        self.student.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        self.losses.append(mean.item() / torch.distributed.get_world_size())
        self.sample = bytes(tokens[0][mask[0] == 1].tolist()).decode(errors="replace")
        if n % 10 == 0 or n == self.args.rounds - 1:
            lengths = mask[:, self.args.prompt_bytes :].sum(1).tolist()
            self.say(f"round {n}: loss {self.losses[-1]:.4f}, answers of {min(lengths)} to {max(lengths)} bytes")

    def report(self) -> None:
        self.say(f"loss from {self.losses[0]:.4f} to {self.losses[-1]:.4f}")
        self.say(f"sample: {self.sample!r}")
        if self.rank == 0 and self.args.output is not None:
            self.args.output.write_text(json.dumps(self.losses))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        self.rollout.shutdown()
        for engine in (self.student, self.teacher):
            engine.destroy()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage of both engines")
    parser.add_argument("--beta", type=float, default=0.5, help="0: forward KL, 1: reverse KL, between: a mixture")
    parser.add_argument("--top_k", type=int, default=0, help="logits that the teacher sends of a byte; 0: all")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--teacher_steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="answers of a rank in one round")
    parser.add_argument("--samples", type=int, default=4, help="answers to one prompt")
    parser.add_argument("--prompt_bytes", type=int, default=16)
    parser.add_argument("--new_bytes", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1, help="of the student; the teacher has twice as many")
    parser.add_argument("--width", type=int, default=64, help="of the teacher; the student has half of it")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--text_bytes", type=int, default=1 << 20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--output", type=Path, help="write the loss of each round, as JSON")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
