"""How long does `generate` take between two training steps, with weights cut at stage 3, against stage 0, against the model without an engine and against DeepSpeed?

A Llama of 100M parameters in fp32 on 2 ranks of one host, one thread a rank; 8 prompts of 128 tokens a rank, 64 more
tokens, greedy. "stage3" has its weights in joint memory, "stage3_gathered" gathers them once for a call, "plain" is
transformers on the same ranks without an engine. DeepSpeed gathers each layer for each token, with `synced_gpus`: its
hybrid engine has no kernels for CPUs (`ppo_step` proves it). DSC_PEER_PYTHON names the interpreter of an environment
with DeepSpeed, and with torch and transformers in the same versions. Without this variable DeepSpeed is left out.

Every contender has two processes, which live through the whole run, and the contenders take turns. A round has a small
training step and then `eval()`, `generate` and `train()`, which are timed together; the slower rank counts. The learning
rate is 0, so all tokens have to be the same, in all rounds and contenders. Weights have to be cut at stage 3, in joint
memory or not as the row says, and no unit may be gathered twice in a call. "switch_ms" is `eval()`, a lease, its end
and `train()`, without tokens. "one_token_above_plain_ms" is the same from outside: `eval()`, one token after a prompt of
one, and `train()`, above the time of "plain". "first_over_alone" is the time of a rank that makes 8 tokens while the
other one makes 64, over its time while the other one rests; for "plain" it says what the shared memory bus costs. Peaks
are proportional set sizes (PSS), of the larger rank, in a training step of 2 rows and in a `generate`.
Run: python -m benchmarks.hf.generate_in_training [--rounds 3] [--layers 7] [--width 768] [--prompt 128]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks.resident import Peak, proportional_bytes
from benchmarks.served import ServedRanks, say

ROOT = Path(__file__).resolve().parents[2]
WORLD, ROWS, NEW, FEW, VOCAB = 2, 8, 64, 8, 32000
SWITCHES = 5  # in a round
TRAIN_ROWS, TRAIN_TOKENS = 2, 32
ZERO_COPY = {"zero_copy_gather": True}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "stage3": {"zero_optimization": {"stage": 3}, "comm": ZERO_COPY},
    "stage3_gathered": {"zero_optimization": {"stage": 3}},
    "stage0": {"zero_optimization": {"stage": 0}},
    "plain": None,
    "deepspeed": {"zero_optimization": {"stage": 3}},
}
ALONE = ("stage3", "plain")  # contenders whose ranks also end alone


class Rank:
    """One rank of a contender. The peer's environment runs it too, so it uses nothing of deepspeed_c for the peer."""

    def __init__(self, contender: str, layers: int, width: int, prompt: int) -> None:
        import torch
        import torch.distributed as dist
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)  # the same weights in all contenders
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=width,
                intermediate_size=width * 8 // 3,
                num_hidden_layers=layers,
                num_attention_heads=width // 64,
                num_key_value_heads=width // 64,
                max_position_embeddings=prompt + NEW,
            )
        )
        self.n_params = self.model.num_parameters()
        self.engine: Any = None
        config = CONFIGS[contender]
        if config is None:
            dist.init_process_group("gloo")
        else:
            if contender == "deepspeed":
                import deepspeed as package
            else:
                import deepspeed_c as package
            package.init_distributed("gloo")
            config = {"train_micro_batch_size_per_gpu": TRAIN_ROWS, **config}
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
            self.engine = package.initialize(model=self.model, model_parameters=self.model.parameters(), config=config)[
                0
            ]
        self.is_ours = config is not None and contender != "deepspeed"
        self.torch, self.dist, self.rank = torch, dist, dist.get_rank()
        self.prompts = self._ids(ROWS, prompt)

    def _ids(self, rows: int, tokens: int) -> Any:
        generator = self.torch.Generator().manual_seed(self.rank)
        return self.torch.randint(3, VOCAB, (rows, tokens), generator=generator)

    def train(self, rows: int, tokens: int) -> None:
        if self.engine is not None:
            ids = self._ids(rows, tokens)
            self.engine.backward(self.engine(input_ids=ids, labels=ids, use_cache=False).loss)
            self.engine.step()

    def generate(self, new: list[int], prompts: Any = None) -> dict[str, Any]:
        """A switch to evaluation, a call that makes ``new[rank]`` tokens, and the switch back. A rank that makes none
        rests."""
        prompts = self.prompts if prompts is None else prompts
        n = new[self.rank]
        gathers = self._n_gathers()
        switched = self.model if self.engine is None else self.engine
        self.dist.barrier()
        begin = time.perf_counter()
        tokens = prompts
        if n:
            switched.eval()
            tokens = self.model.generate(
                prompts,
                attention_mask=self.torch.ones_like(prompts),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
                synced_gpus=self.engine is not None,
            )
            switched.train()
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "new": tokens.shape[1] - prompts.shape[1],
            "checksum": zlib.crc32(tokens.numpy().tobytes()),
            "gathers": self._n_gathers() - gathers,
        }

    def _n_gathers(self) -> int:
        if not self.is_ours:
            return 0
        from benchmarks.engines import n_gathers

        return n_gathers(self.engine)

    def _lease(self) -> Any:
        """Our driver of leases, if any weights are sharded."""
        fetcher = self.engine._optimizer.fetcher if self.is_ours else None
        if fetcher is None:
            return None
        from deepspeed_c.zero.weights.drivers.lease import Lease

        return fetcher.drivers.of(Lease)

    def switch(self) -> dict[str, float]:
        """Median milliseconds of a switch and its parts, and of a switch with one token."""
        found: dict[str, list[float]] = {"one_token": [], "switch": [], "lease": [], "end_lease": []}
        lease = self._lease()
        prompt = self.prompts[:1, :1].contiguous()
        for _ in range(SWITCHES):
            found["one_token"].append(self.generate([1] * WORLD, prompt)["seconds"])
            if self.is_ours:
                self.dist.barrier()
                begin = time.perf_counter()
                self.engine.eval()
                after_eval = time.perf_counter()
                if lease is not None:
                    lease.begin()
                leased = time.perf_counter()
                if lease is not None:
                    lease.end()
                ended = time.perf_counter()
                self.engine.train()
                found["switch"].append(time.perf_counter() - begin)
                found["lease"].append(leased - after_eval)
                found["end_lease"].append(ended - leased)
        return {key: 1e3 * statistics.median(values) for key, values in found.items() if values}

    def peaks(self) -> dict[str, int]:
        """Bytes of the largest set in a training step with as many tokens a row as in generation, and in generation."""
        phases = {
            "training": lambda: self.train(TRAIN_ROWS, self.prompts.shape[1] + NEW),
            "generation": lambda: self.generate([NEW] * WORLD),
        }
        found = {}
        for name, run in phases.items():
            ctypes.CDLL(None).malloc_trim(0)  # memory that the C library keeps would belong to the phase before
            with Peak(proportional_bytes) as peak:
                run()
            found[name] = peak.peak
        return found

    def about(self) -> dict[str, Any]:
        import importlib.metadata

        engine = self.engine
        found = {
            "engine": "" if engine is None else type(engine).__module__.split(".")[0],
            "stage": None if engine is None else engine.zero_optimization_stage(),
            "params": self.n_params,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        }
        if self.is_ours:
            from benchmarks.engines import sharded_elems

            fetcher = engine._optimizer.fetcher
            groups = [] if fetcher is None else fetcher.groups
            found |= {"sharded": sharded_elems(engine)[0], "units": len(groups)}
            found["joint_units"] = sum(not group.source.is_collective for group in groups)
        return found


def serve(contender: str, options: argparse.Namespace) -> None:
    """Measure one rank of one contender: an answer for each line of standard input."""
    rank = Rank(contender, options.layers, options.width, options.prompt)
    rank.train(TRAIN_ROWS, TRAIN_TOKENS)
    rank.generate([2] * WORLD)
    say(rank.about())
    for line in sys.stdin:
        question = json.loads(line)
        if question == "switch":
            say(rank.switch())
        elif question == "peaks":
            say(rank.peaks())
        else:
            rank.train(TRAIN_ROWS, TRAIN_TOKENS)
            say(rank.generate(question))
    sys.stdout.flush()
    os._exit(0)


class Contender:
    """The ranks of one contender, and what they have answered."""

    def __init__(self, name: str, python: str, options: argparse.Namespace, extensions: str) -> None:
        from tests.ranks import free_port

        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}
        environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT)}
        if name == "deepspeed":  # ninja is found beside its interpreter
            environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
        command = [python, "-m", "benchmarks.hf.generate_in_training", "--serve", name]
        for key in ("layers", "width", "prompt"):
            command += [f"--{key}", str(getattr(options, key))]
        self.name = name
        self.ranks = ServedRanks(command, environment, WORLD, free_port())
        self.calls: dict[tuple[int, ...], list[list[dict[str, Any]]]] = {}
        self.switches: list[dict[str, float]] = []

    def prove(self) -> None:
        """Wait until the ranks are ready, and require that they are what the row says."""
        from benchmarks.measure import require

        self.abouts = self.ranks.answers()
        self.n_params = self.abouts[0]["params"]
        for about in self.abouts:
            engine = {"plain": "", "deepspeed": "deepspeed"}.get(self.name, "deepspeed_c")
            require(about["engine"] == engine, f"{self.name} runs on its own engine: {about}")
            stage = {"plain": None, "stage0": 0}.get(self.name, 3)
            require(about["stage"] == stage, f"{self.name} runs at stage {stage}: {about}")
            if engine == "deepspeed_c":
                expected = 0.9 * self.n_params if stage == 3 else 0
                require(about["sharded"] >= expected, f"{expected} elements of {self.name} are cut: {about}")
                joint = about["units"] if self.name == "stage3" else 0
                require(about["joint_units"] == joint, f"{joint} units of {self.name} are in joint memory: {about}")

    def generate(self, *new: int) -> None:
        """One call in which rank i makes ``new[i]`` tokens."""
        from benchmarks.measure import require

        answers = self.ranks.ask(json.dumps(new))
        for rank, (found, about) in enumerate(zip(answers, self.abouts, strict=True)):
            require(found["new"] == new[rank], f"rank {rank} of {self.name} makes {new[rank]} tokens: {found}")
            if self.name.startswith("stage3") and new[rank]:
                n_units = about["units"]
                require(0 < found["gathers"] <= n_units, f"each of {n_units} units is gathered once at most: {found}")
        self.calls.setdefault(new, []).append(answers)

    def _lease(self) -> Any:
        """Our driver of leases, if any weights are sharded."""
        fetcher = self.engine._optimizer.fetcher if self.is_ours else None
        if fetcher is None:
            return None
        from deepspeed_c.zero.weights.drivers.lease import Lease

        return fetcher.drivers.of(Lease)

    def switch(self) -> None:
        answers = self.ranks.ask(json.dumps("switch"))
        self.switches.append({key: max(each[key] for each in answers) for key in answers[0]})

    def seconds(self) -> list[float]:
        return [max(rank["seconds"] for rank in answers) for answers in self.calls[NEW, NEW]]

    def first_seconds(self, other: int) -> list[float]:
        """Seconds of the first rank, which makes ``FEW`` tokens while the other one makes ``other``."""
        return [answers[0]["seconds"] for answers in self.calls[FEW, other]]

    def checksums(self) -> set[tuple[int, ...]]:
        return {tuple(rank["checksum"] for rank in answers) for answers in self.calls[NEW, NEW]}

    def peaks(self) -> dict[str, float]:
        answers = self.ranks.ask(json.dumps("peaks"))
        return {key: max(each[key] for each in answers) / 2**20 for key in answers[0]}


def compare(options: argparse.Namespace) -> None:
    from benchmarks.measure import in_turn, peer_extensions, require

    pythons = {name: sys.executable for name in CONFIGS if name != "deepspeed"}
    if peer := os.environ.get("DSC_PEER_PYTHON"):
        pythons["deepspeed"] = peer
    extensions = peer_extensions()
    running: dict[str, Contender] = {}
    try:
        for name, python in pythons.items():
            running[name] = Contender(name, python, options, extensions)
            running[name].prove()
        versions = [about["versions"] for each in running.values() for about in each.abouts]
        require(all(found == versions[0] for found in versions), f"all have the same versions: {versions}")
        for round_ in range(options.rounds):
            for name in in_turn(list(running), round_):
                running[name].generate(NEW, NEW)
            for name in in_turn(list(running), round_):
                running[name].switch()
            # Turns of the two lengths lie side by side, because their ratio is the figure.
            for name in in_turn(ALONE, round_):
                for other in in_turn((0, NEW), round_):
                    running[name].generate(FEW, other)
        checksums = {name: each.checksums() for name, each in running.items()}
        require(len(set.union(*checksums.values())) == 1, f"all tokens are the same: {checksums}")
        peaks = {}
        for name, each in running.items():
            peaks[name] = each.peaks()
            each.ranks.close()  # to leave room for the next peak
    finally:
        for each in running.values():
            each.ranks.close()
    for name in running:
        print(json.dumps(row(name, running, peaks[name], options)), flush=True)


def row(
    name: str, running: dict[str, Contender], peaks: dict[str, float], options: argparse.Namespace
) -> dict[str, Any]:
    from benchmarks.measure import machine, median_spread, ratios

    mine, plain = running[name], running["plain"]
    median, least, most = median_spread(mine.seconds())
    line: dict[str, Any] = {"benchmark": "generate_in_training", "contender": name, "params": mine.n_params}
    line |= {"ranks": WORLD, "rows": ROWS, "prompt": options.prompt, "new": NEW, "rounds": options.rounds}
    line |= {"seconds": round(median, 4), "seconds_min": round(least, 4), "seconds_max": round(most, 4)}
    for other in ("plain", "stage0", "deepspeed"):
        if other in running and other != name:
            line |= ratios(f"ratio_to_{other}", mine.seconds(), running[other].seconds())
    above = [a["one_token"] - b["one_token"] for a, b in zip(mine.switches, plain.switches, strict=True)]
    if name != "plain":
        line["one_token_above_plain_ms"] = round(statistics.median(above), 2)
    for key in ("switch", "lease", "end_lease"):
        if key in mine.switches[0]:
            found = median_spread([each[key] for each in mine.switches])
            line |= dict(
                zip((f"{key}_ms", f"{key}_ms_min", f"{key}_ms_max"), (round(value, 3) for value in found), strict=True)
            )
    if name in ALONE:
        line |= ratios("first_over_alone", mine.first_seconds(NEW), mine.first_seconds(0))
        if name != "plain":
            line |= ratios("first_to_plain", mine.first_seconds(NEW), plain.first_seconds(NEW))
    line["peak_generation_mib"] = round(peaks["generation"], 1)
    if name != "plain":
        line["peak_training_mib"] = round(peaks["training"], 1)
        line["generation_above_training_mib"] = round(peaks["generation"] - peaks["training"], 1)
    return {**line, "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time generate between training steps.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--width", type=int, default=768, help="of the model; a multiple of 192")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--serve", choices=CONFIGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
