"""How long do 16 prompts take through `mii.pipeline`, and how much time does a deployment add to a request?

16 prompts of 24 to 40 tokens, 32 more tokens each, greedy, a Llama of 350M parameters in bf16 in one process on all
processors: `mii.pipeline` gets them in one call; `transformers` generates one after another; the engine alone gets the
same steps by `put` and chooses by argmax, which is the bound. The three take turns.

A request of one token goes through `mii.client` to a deployment of a small Llama, and straight to an engine of the same
model in this process. The difference is the cost of the deployment: socket, relay, replica. Before that, the processes of
the deployment have nothing to do for some seconds. Their processor time comes from /proc.
Run: python -m benchmarks.hf.serving [--rounds 5] [--layers 16] [--width 1152]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.hf.generate import make_model
from benchmarks.measure import machine, median_spread, ratios, require, time_alternately
from deepspeed_c import _C, mii
from deepspeed_c.mii.deployment import registry
from examples.text import standard_library

PROMPTS, NEW, WORDS = 16, 32, 8000
TINY_LAYERS, TINY_WIDTH = 1, 64
WARMUP = 1


def make_tokenizer(n_words: int) -> Any:
    """A byte-level BPE of Python's own source."""
    import tokenizers
    import transformers

    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=n_words,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = standard_library(1 << 20)[0].decode(errors="replace")
    found.train_from_iterator(text.splitlines(), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>")


def write_model(folder: str, layers: int, width: int, tokenizer: Any) -> Any:
    """Writes model and tokenizer. Returns the model, in bf16."""
    model = make_model(layers, width)
    frequencies = model.model.rotary_emb.inv_freq
    model = model.bfloat16()
    model.model.rotary_emb.inv_freq = frequencies  # as from_pretrained leaves it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def texts_of(tokenizer: Any) -> list[str]:
    """Prompts of 24 to 40 tokens."""
    text = standard_library(1 << 20)[1].decode(errors="replace")
    tokens = tokenizer.encode(text[: 1 << 16])
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(24, 41, (PROMPTS,), generator=rng).tolist()
    return [tokenizer.decode(tokens[i * 50 : i * 50 + n]) for i, n in enumerate(lengths)]


def settings(n_blocks: int = 200) -> dict[str, Any]:
    """Nothing is found, so that each round computes the prompts."""
    memory = {"mode": "allocate", "size": n_blocks}
    return {"state_manager": {"memory_config": memory, "enable_prefix_caching": False}}


def put_all(engine: Any, prompts: list[torch.Tensor], n_words: int) -> None:
    """The steps of the pipeline, without it."""
    uids, tokens = list(range(len(prompts))), prompts
    for _ in range(NEW):
        tokens = list(engine.put(uids, tokens, do_checks=False)[:, :n_words].argmax(-1, keepdim=True))
    for uid in uids:
        engine.flush(uid)


def compare_pipeline(options: argparse.Namespace, tokenizer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = write_model(folder, options.layers, options.width, tokenizer).eval()
        pipe = mii.pipeline(folder, inference_engine_config=settings())
        texts = texts_of(tokenizer)
        prompts = [torch.tensor(tokenizer.encode(text)) for text in texts]
        wishes = {"max_new_tokens": NEW, "do_sample": False, "ignore_eos": True}

        def by_transformers(_: Any = None) -> int:
            n_made = 0
            for prompt in prompts:
                ids = prompt[None]
                made = plain.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    do_sample=False,
                    pad_token_id=0,
                )
                n_made += made.shape[1] - len(prompt)
            return n_made

        n_made = sum(each.generated_length for each in pipe(texts, **wishes))
        require(n_made == by_transformers() == PROMPTS * NEW, f"each makes {PROMPTS * NEW} tokens: {n_made}")
        steps = {
            "pipeline": lambda _: pipe(texts, **wishes),
            "transformers": by_transformers,
            "engine": lambda _: put_all(pipe.inference_engine, prompts, len(tokenizer)),
        }
        times = time_alternately(steps, None, options.rounds, warmup=WARMUP)
        line = {
            "benchmark": "serving",
            "params": sum(param.numel() for param in plain.parameters()),
            "threads": torch.get_num_threads(),
            "machine": machine(),
            "contender": "pipeline",
            "prompts": PROMPTS,
            "new": NEW,
            "ms_per_token": round(median_spread(times["pipeline"])[0] / PROMPTS / NEW * 1e3, 2),
        }
        line |= ratios("ratio_to_transformers", times["pipeline"], times["transformers"])
        line |= ratios("ratio_to_engine", times["pipeline"], times["engine"])
        print(json.dumps(line), flush=True)
        pipe.destroy()


def processor_seconds(pids: list[int]) -> float:
    """The processor time that processes have used, from /proc."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> list[int]:
    """A process and all that it has started."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text(encoding="utf-8").split()
    ]
    return [pid, *(each for child in children for each in below(child))]


def deployment_of(name: str) -> int:
    """The process that holds a deployment."""
    folder = str(registry.find(name).folder).encode()
    lines = {int(path.name): _command_line(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [pid for pid, line in lines.items() if folder in line and b"supervisor" in line]
    require(len(found) == 1, f"one process has the deployment: {found}")
    return found[0]


def _command_line(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


def compare_client(options: argparse.Namespace, tokenizer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, TINY_LAYERS, TINY_WIDTH, tokenizer)
        name = f"benchmark-{os.getpid()}"
        client = mii.serve(folder, deployment_name=name, inference_engine_config=settings())
        try:
            pids = below(deployment_of(name))
            before = processor_seconds(pids)
            time.sleep(options.idle_s)
            idle = (processor_seconds(pids) - before) / options.idle_s
            pipe = mii.pipeline(folder, inference_engine_config=settings())
            text = texts_of(tokenizer)[0]
            prompt = torch.tensor(tokenizer.encode(text))

            def by_engine(_: Any) -> None:
                pipe.inference_engine.put([0], [prompt])
                pipe.inference_engine.flush(0)

            steps = {
                "client": lambda _: client(text, max_new_tokens=1, do_sample=False),
                "engine": by_engine,
            }
            times = time_alternately(steps, None, options.requests, warmup=10)
            added = [(mine - bound) * 1e3 for mine, bound in zip(times["client"], times["engine"])]
            middle, least, most = median_spread(added)
            line = {
                "benchmark": "serving",
                "machine": machine(),
                "contender": "client",
                "ms_added": round(middle, 3),
                "ms_added_min": round(least, 3),
                "ms_added_max": round(most, 3),
                "idle_share": round(idle, 4),
                "processes": len(pids),
            }
            print(json.dumps(line), flush=True)
            pipe.destroy()
        finally:
            client.terminate_server()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--idle_s", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(_C.pool_n_threads())
    tokenizer = make_tokenizer(WORDS)
    compare_pipeline(options, tokenizer)
    compare_client(options, tokenizer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
