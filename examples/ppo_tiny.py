"""Train a small OPT to write bytes that look like Python, by proximal policy optimization. To start it:

    deepspeed_c --num_procs 2 examples/ppo_tiny.py --stage 3

The calls are those of DeepSpeed-Chat's third step: an actor that trains and generates in a hybrid engine, a critic, and
the actor as it was as reference. With the imports of ``deepspeed`` in place of ``deepspeed_c`` it is a program for
DeepSpeed. All models are made from configurations. One token is one byte, prompts are cut from the Python standard
library's own source, and the reward of a byte is how likely it is there after the byte before it.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from text import as_tensor, standard_library
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import deepspeed_c as deepspeed

VOCAB, PAD = 256, 0  # one token is one byte; no source has byte 0
FLOOR = -12.0  # log2 of the probability that counts as none
KL, CLIP, GAMMA, LAMBDA = 0.15, 0.2, 0.95, 0.9


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(args.seed)
    text = as_tensor(standard_library(args.text_bytes)[0]).long()
    with closing(Trainer(args, likelihoods(text))) as trainer:
        prompts = Prompts(text, args.prompt_bytes, trainer.rank)
        for n in range(args.rounds):
            experience = trainer.write(prompts.draw(args.batch))
            trainer.train(experience)
            trainer.note(n, experience)
        trainer.report(args)


def likelihoods(text: torch.Tensor) -> torch.Tensor:
    """[before, byte]: log2 of the probability of a byte after another one, between ``FLOOR`` and 0."""
    pairs = torch.bincount(text[:-1] * VOCAB + text[1:], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double()
    return (pairs / pairs.sum(1, keepdim=True).clamp(min=1)).log2().clamp(min=FLOOR).float()


class Prompts:
    """Pieces of ``text`` of up to ``n_bytes`` bytes, padded on the left. Each rank draws its own."""

    def __init__(self, text: torch.Tensor, n_bytes: int, rank: int) -> None:
        self.text, self.n_bytes = text, n_bytes
        self.random = torch.Generator().manual_seed(rank)

    def draw(self, n: int) -> torch.Tensor:
        begins = torch.randint(len(self.text) - self.n_bytes, (n, 1), generator=self.random)
        prompts = self.text[begins + torch.arange(self.n_bytes)]
        n_padding = torch.randint(self.n_bytes // 2, (n, 1), generator=self.random)
        return prompts.masked_fill(torch.arange(self.n_bytes) < n_padding, PAD)


def opt(args: argparse.Namespace) -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=args.width,
            word_embed_proj_dim=args.width,
            ffn_dim=4 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            max_position_embeddings=args.prompt_bytes + args.new_bytes,
            dropout=0.0,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def with_lora(model: OPTForCausalLM, rank: int) -> nn.Module:
    """The model with factors of ``rank`` beside the matrices of its layers, which are not trained. All else is."""
    import peft

    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "fc1", "fc2"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    for name, param in adapted.named_parameters():
        param.requires_grad_(not name.endswith("base_layer.weight"))
    return adapted


class Critic(nn.Module):
    """Estimates at each place [batch, tokens] the rewards to come."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.body = opt(args).model
        self.value = nn.Linear(args.width, 1)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.value(self.body(input_ids=tokens, attention_mask=mask).last_hidden_state)[..., 0]


@dataclass
class Experience:
    """Text of one rank. tokens, mask: [batch, tokens]. n_prompt: tokens of the prompts, with their padding. All others are
    float tensors [batch, new tokens].
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    n_prompt: int
    log_probs: torch.Tensor
    kl: torch.Tensor
    scores: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


class Trainer:
    """The three models' engines, and the rewards so far."""

    def __init__(self, args: argparse.Namespace, likelihoods: torch.Tensor) -> None:
        self.args, self.likelihoods = args, likelihoods
        actor, reference, critic = opt(args), opt(args), Critic(args)
        reference.load_state_dict(actor.state_dict())
        if args.lora:
            actor = with_lora(actor, args.lora)
        hybrid = {
            "enabled": True,
            "max_out_tokens": args.prompt_bytes + args.new_bytes,
            "inference_tp_size": args.inference_tp_size,
        }
        self.actor, *_ = deepspeed.initialize(model=actor, config=self.config(lr=args.lr, hybrid_engine=hybrid))
        self.critic, *_ = deepspeed.initialize(model=critic, config=self.config(lr=args.lr))
        self.reference, *_ = deepspeed.initialize(model=reference, config=self.config(lr=None))
        self.reference.eval()
        self.rank = torch.distributed.get_rank()
        self.rewards: list[float] = []  # mean over new bytes and ranks, by round
        self.sample = ""

    def config(self, lr: float | None, **more: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.args.batch,
            "zero_optimization": {"stage": self.args.stage},
            "gradient_clipping": 1.0,
            **more,
        }
        if self.args.offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if lr is not None:
            config["optimizer"] = {"type": "Adam", "params": {"lr": lr}}
            config["steps_per_print"] = 2 * self.args.epochs * 10
        return config

    @torch.no_grad()
    def write(self, prompts: torch.Tensor) -> Experience:
        """The actor goes on with ``prompts``. The reference, the critic and the text judge the new bytes."""
        self.actor.eval()
        self.critic.eval()
        mask, n_prompt = (prompts != PAD).long(), prompts.shape[1]
        tokens = self.actor.module.generate(
            prompts.to(self.actor.device),
            attention_mask=mask.to(self.actor.device),
            max_length=n_prompt + self.args.new_bytes,
            min_length=n_prompt + self.args.new_bytes,
            do_sample=True,
            top_k=0,
            pad_token_id=PAD,
            synced_gpus=True,
        )
        mask = torch.cat([mask, torch.ones(len(mask), self.args.new_bytes, dtype=torch.long)], 1).to(tokens.device)
        log_probs = self.log_probs(self.actor, tokens, mask, n_prompt)
        kl = log_probs - self.log_probs(self.reference, tokens, mask, n_prompt)
        scores = self.likelihoods.to(tokens.device)[tokens[:, n_prompt - 1 : -1], tokens[:, n_prompt:]]
        values = self.critic(tokens, mask)[:, n_prompt - 1 : -1]
        advantages = advantages_of(1 - scores / FLOOR - KL * kl, values)
        self.actor.train()
        self.critic.train()
        return Experience(tokens, mask, n_prompt, log_probs, kl, scores, advantages, advantages + values)

    def train(self, it: Experience) -> None:
        """Steps of the actor and the critic."""
        advantages = (it.advantages - it.advantages.mean()) / (it.advantages.std() + 1e-6)
        for _ in range(self.args.epochs):
            ratio = (self.log_probs(self.actor, it.tokens, it.mask, it.n_prompt) - it.log_probs).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            self.actor.backward(-torch.minimum(ratio * advantages, clipped * advantages).mean())
            self.actor.step()
            values = self.critic(it.tokens, it.mask)[:, it.n_prompt - 1 : -1]
            self.critic.backward((values - it.returns).square().mean())
            self.critic.step()

    def log_probs(self, engine: Any, tokens: torch.Tensor, mask: torch.Tensor, n_prompt: int) -> torch.Tensor:
        """[batch, new tokens]: log of the probability of each new token."""
        logits = engine(input_ids=tokens, attention_mask=mask).logits[:, n_prompt - 1 : -1]
        return logits.float().log_softmax(-1).gather(-1, tokens[:, n_prompt:, None])[..., 0]

    def note(self, n: int, it: Experience) -> None:
        """Keeps the round's mean reward, and prints it now and then."""
        sums = torch.stack([it.scores.mean(), it.kl.mean()])
        torch.distributed.all_reduce(sums)
        reward, kl = (sums / torch.distributed.get_world_size()).tolist()
        self.rewards.append(reward)
        self.sample = bytes(it.tokens[0].tolist()).lstrip(b"\0").decode(errors="replace")
        if n % 10 == 0 or n == self.args.rounds - 1:
            self.say(f"round {n}: reward {reward:.2f} bits per byte, {kl:.2f} nats from the reference")

    def report(self, args: argparse.Namespace) -> None:
        self.say(f"reward from {self.rewards[0]:.2f} to {self.rewards[-1]:.2f} bits per byte")
        self.say(f"sample: {self.sample!r}")
        if self.rank == 0 and args.output is not None:
            args.output.write_text(json.dumps(self.rewards))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        for engine in (self.actor, self.critic, self.reference):
            engine.destroy()


def advantages_of(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16); all tensors are [batch, tokens]."""
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = rewards + GAMMA * after - values
    advantages = torch.empty_like(deltas)
    later: torch.Tensor | float = 0.0
    for i in reversed(range(deltas.shape[1])):
        later = advantages[:, i] = deltas[:, i] + GAMMA * LAMBDA * later
    return advantages


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage of all engines")
    parser.add_argument("--offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument("--inference_tp_size", type=int, default=1, help="ranks that generate in one batch")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA factors in the actor; 0: none")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=2, help="steps with the text of one round")
    parser.add_argument("--batch", type=int, default=16, help="prompts of a rank in one round")
    parser.add_argument("--prompt_bytes", type=int, default=16)
    parser.add_argument("--new_bytes", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--text_bytes", type=int, default=1 << 20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--output", type=Path, help="write the mean reward of each round, as JSON")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
