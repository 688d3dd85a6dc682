"""How long is a step of proximal policy optimization in the manner of DeepSpeed-Chat, and how much memory does a rank take, against DeepSpeed?

An actor, a critic, a reference and a reward model, OPTs of 23M parameters each from one configuration, fp32, stage 3 on
2 ranks of one host, one thread a rank. A step: the actor goes on with 4 prompts of 64 tokens a rank by 64 sampled
tokens, the three other models judge them, and the actor and the critic train on them once. The package's name is the
only difference. The actor asks for the hybrid engine with both packages; DeepSpeed's does not run on CPUs, which the
run proves first, so DeepSpeed generates with its usual engine and `synced_gpus`. "deepspeed_c, joint" has
`comm.zero_copy_gather` in addition. DSC_PEER_PYTHON names the interpreter of an environment with DeepSpeed, and with
torch and transformers in the same versions. Without it only ours are measured.

Every contender has two processes, which live through the whole run, and the contenders take turns. The first step has to
have the same tokens and losses in all contenders; from then on rounding may change which token is drawn, and mean log
probabilities have to be the same within 2 %. The slower rank counts. Peaks are proportional set sizes (PSS) of the larger
rank, in one more step.
Run: python -m benchmarks.hf.ppo_step [--rounds 4] [--layers 6] [--width 512] [--new 64]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks.resident import Peak, proportional_bytes
from benchmarks.served import ServedRanks, say

ROOT = Path(__file__).resolve().parents[2]
WORLD, ROWS, PROMPT, VOCAB, WARMUP = 2, 4, 64, 8192, 1
OURS, JOINT, THEIRS = "deepspeed_c", "deepspeed_c, joint", "deepspeed"
LR, KL, CLIP, GAMMA, LAMBDA = 1e-5, 0.1, 0.2, 1.0, 0.95
FIRST_TOLERANCE, TOLERANCE = 1e-4, 2e-2
PHASES = ("generate", "judge", "train")
NO_HYBRID = "This op had not been implemented on CPU backend."


def make_opt(layers: int, width: int, tokens: int) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            word_embed_proj_dim=width,
            ffn_dim=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=tokens,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_judge(layers: int, width: int, tokens: int) -> Any:
    """A model that gives each place [rows, tokens] a value."""
    import torch

    class Judge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = make_opt(layers, width, tokens).model
            self.value = torch.nn.Linear(width, 1, bias=False)

        def forward(self, ids: Any) -> Any:
            hidden = self.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
            return self.value(hidden)[..., 0]

    return Judge()


class Trainer:
    """One rank's part of a step. The peer's environment runs it too, so it uses nothing of deepspeed_c for the peer."""

    def __init__(self, package: Any, options: argparse.Namespace, *, is_hybrid: bool, more: dict[str, Any]) -> None:
        import torch

        self.torch, self.new = torch, options.new
        torch.set_num_threads(1)
        package.init_distributed("gloo")
        self.rank = torch.distributed.get_rank()
        shape = (options.layers, options.width, PROMPT + options.new)
        torch.manual_seed(0)  # the same weights in all contenders
        actor, reference = make_opt(*shape), make_opt(*shape)
        critic, reward = make_judge(*shape), make_judge(*shape)
        reference.load_state_dict(actor.state_dict())
        self.n_params = actor.num_parameters()

        def engine_of(model: Any, *, trains: bool = False, is_actor: bool = False) -> Any:
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": ROWS,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000},
                "gradient_clipping": 1.0,
                **more,
            }
            if trains:
                config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
            if is_actor and is_hybrid:
                config["hybrid_engine"] = {"enabled": True, "max_out_tokens": PROMPT + options.new}
            params = {"model_parameters": model.parameters()} if trains else {}
            return package.initialize(model=model, config=config, **params)[0]

        self.actor, self.critic = engine_of(actor, trains=True, is_actor=True), engine_of(critic, trains=True)
        self.reference, self.reward = engine_of(reference), engine_of(reward)
        self.reference.eval()
        self.reward.eval()
        self.prompts = torch.Generator().manual_seed(self.rank)

    def step(self, number: int) -> dict[str, Any]:
        torch = self.torch
        prompts = torch.randint(1, VOCAB, (ROWS, PROMPT), generator=self.prompts)
        torch.manual_seed(1000 * number + self.rank)  # the same draws in all contenders
        torch.distributed.barrier()
        begin = time.perf_counter()
        self.actor.eval()
        self.critic.eval()
        with torch.no_grad():
            tokens = self.actor.module.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=self.new,
                min_new_tokens=self.new,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                synced_gpus=True,
            )
            generated = time.perf_counter()
            before = self.log_probs(self.actor, tokens)
            kl = before - self.log_probs(self.reference, tokens)
            rewards = -KL * kl
            rewards[:, -1] += self.reward(tokens)[:, -1]
            values = self.critic(tokens)[:, PROMPT - 1 : -1]
            advantages = self.advantages(rewards, values)
        self.actor.train()
        self.critic.train()
        judged = time.perf_counter()
        ratio = (self.log_probs(self.actor, tokens) - before).exp()
        actor_loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        self.actor.backward(actor_loss)
        self.actor.step()
        critic_loss = (self.critic(tokens)[:, PROMPT - 1 : -1] - (advantages + values)).square().mean()
        self.critic.backward(critic_loss)
        self.critic.step()
        end = time.perf_counter()
        return {
            "seconds": end - begin,
            "generate": generated - begin,
            "judge": judged - generated,
            "train": end - judged,
            "new": tokens.shape[1] - PROMPT,
            "checksum": zlib.crc32(tokens.numpy().tobytes()),
            "log_prob": before.mean().item(),
            "actor_loss": actor_loss.item(),
            "critic_loss": critic_loss.item(),
        }

    def log_probs(self, engine: Any, tokens: Any) -> Any:
        """[rows, new tokens]: log of the probability of each new token."""
        logits = engine(input_ids=tokens, attention_mask=self.torch.ones_like(tokens), use_cache=False).logits
        return logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]

    def advantages(self, rewards: Any, values: Any) -> Any:
        """Generalized advantage estimation (arXiv 1506.02438, equation 16); all tensors are [rows, new tokens]."""
        torch = self.torch
        deltas = rewards + GAMMA * torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1) - values
        found, later = torch.empty_like(deltas), 0.0
        for i in reversed(range(deltas.shape[1])):
            later = found[:, i] = deltas[:, i] + GAMMA * LAMBDA * later
        return found

    def about(self) -> dict[str, Any]:
        import importlib.metadata

        engines = {name: getattr(self, name) for name in ("actor", "critic", "reference", "reward")}
        return {
            "engines": [type(engine).__module__.split(".")[0] for engine in engines.values()],
            "actor": type(self.actor).__name__,
            "stages": [engine.zero_optimization_stage() for engine in engines.values()],
            "params": self.n_params,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        }


def serve(contender: str, options: argparse.Namespace) -> None:
    """Measure one rank of one contender: an answer for each line of standard input."""
    if contender == THEIRS:
        import deepspeed as package
    else:
        import deepspeed_c as package
    more = {"comm": {"zero_copy_gather": True}} if contender == JOINT else {}
    trainer = Trainer(package, options, is_hybrid=contender != THEIRS or options.asks_hybrid, more=more)
    say(trainer.about())
    for number, line in enumerate(sys.stdin):
        if line == "peak\n":
            with Peak(proportional_bytes) as peak:
                trainer.step(number)
            say({"peak": peak.peak})
        else:
            say(trainer.step(number))
    sys.stdout.flush()
    os._exit(0)


def start_of(contender: str, python: str, options: argparse.Namespace, extensions: str) -> tuple[list[str], dict]:
    """Return the command and the environment of a rank."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}
    environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT)}
    if contender == THEIRS:  # ninja is found beside its interpreter
        environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    command = [python, "-m", "benchmarks.hf.ppo_step", "--serve", contender]
    for key in ("layers", "width", "new"):
        command += [f"--{key}", str(getattr(options, key))]
    return command, environment


def require_no_hybrid(python: str, options: argparse.Namespace, extensions: str) -> None:
    """Require that DeepSpeed's hybrid engine cannot be made on this machine, for want of kernels."""
    from benchmarks.measure import require
    from tests.ranks import free_port

    command, environment = start_of(THEIRS, python, options, extensions)
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [*command, "--asks-hybrid"],
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    require(
        done.returncode != 0 and NO_HYBRID in done.stderr,
        f"DeepSpeed's hybrid engine ends with {NO_HYBRID!r}: exit code {done.returncode}, {done.stderr[-500:]}",
    )


def check(name: str, abouts: list[dict[str, Any]], versions: dict[str, str]) -> None:
    from benchmarks.measure import require

    own = THEIRS if name == THEIRS else OURS
    actor = "DeepSpeedEngine" if name == THEIRS else "DeepSpeedHybridEngine"
    for about in abouts:
        require(set(about["engines"]) == {own}, f"{name} runs on its own engines: {about}")
        require(set(about["stages"]) == {3}, f"all engines of {name} run at stage 3: {about}")
        require(about["actor"] == actor, f"the actor of {name} is a {actor}: {about}")
        require(about["versions"] == versions, f"{name} has the versions {versions}: {about}")


def compare(options: argparse.Namespace) -> None:
    from benchmarks.measure import in_turn, machine, median_spread, peer_extensions, ratios, require, require_equal
    from tests.ranks import free_port

    pythons = dict.fromkeys((OURS, JOINT), sys.executable)
    extensions = peer_extensions()
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        pythons[THEIRS] = peer
        require_no_hybrid(peer, options, extensions)
    running: dict[str, ServedRanks] = {}
    steps: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in pythons}
    try:
        for name, python in pythons.items():
            running[name] = ServedRanks(*start_of(name, python, options, extensions), WORLD, free_port())
        abouts = {name: ranks.answers() for name, ranks in running.items()}
        for name, found in abouts.items():
            check(name, found, abouts[OURS][0]["versions"])
        for round_ in range(WARMUP + options.rounds):
            for name in in_turn(list(running), round_):
                steps[name].append(running[name].ask())
            for rank in range(WORLD):
                last = {name: found[-1][rank] for name, found in steps.items()}
                require(all(each["new"] == options.new for each in last.values()), f"tokens are made: {last}")
                values = {name: each["log_prob"] for name, each in last.items()}
                require_equal("log probabilities", values, TOLERANCE)
                if round_ == 0:
                    require(len({each["checksum"] for each in last.values()}) == 1, f"first tokens are equal: {last}")
                    for key in ("log_prob", "critic_loss"):
                        require_equal(key, {name: each[key] for name, each in last.items()}, FIRST_TOLERANCE)
        peaks = {name: max(each["peak"] for each in ranks.ask("peak")) for name, ranks in running.items()}
    finally:
        for ranks in running.values():
            ranks.close()

    def slower(name: str, key: str) -> list[float]:
        return [max(rank[key] for rank in ranks) for ranks in steps[name][WARMUP:]]

    for name in running:
        median, least, most = median_spread(slower(name, "seconds"))
        line: dict[str, Any] = {"benchmark": "ppo_step", "contender": name, "actor": abouts[name][0]["actor"]}
        line |= {
            "params": abouts[name][0]["params"],
            "ranks": WORLD,
            "rows": ROWS,
            "prompt": PROMPT,
            "new": options.new,
        }
        line |= {"rounds": options.rounds, "seconds": round(median, 4)}
        line |= {"seconds_min": round(least, 4), "seconds_max": round(most, 4)}
        line |= {f"{phase}_s": round(median_spread(slower(name, phase))[0], 4) for phase in PHASES}
        line["peak_mib"] = round(peaks[name] / 2**20, 1)
        if THEIRS in running and name != THEIRS:
            line |= ratios("ratio_to_deepspeed", slower(name, "seconds"), slower(THEIRS, "seconds"))
            for phase in PHASES:
                line |= ratios(f"{phase}_to_deepspeed", slower(name, phase), slower(THEIRS, phase))
            line["memory_to_deepspeed"] = round(peaks[name] / peaks[THEIRS], 4)
        print(json.dumps({**line, "machine": machine()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time steps of proximal policy optimization.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512, help="of the models; a multiple of 64")
    parser.add_argument("--new", type=int, default=64, help="tokens that a row gets")
    parser.add_argument("--serve", choices=(OURS, JOINT, THEIRS), help=argparse.SUPPRESS)
    parser.add_argument("--asks-hybrid", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
