"""How long do a prompt of 512 tokens and a token after it take in fp16 through `init_inference`, against transformers?

A Llama of 55M parameters has layers of `nn.Linear`. A GPT-2 of 46M keeps its weights transposed, and torch's fp16 is
ten times slower for these. Both run on one thread. Times are processor time, because other programs add little to it.
The case "avx2" limits torch and our own code to AVX2. The case "native" limits nothing: torch's fp16 is slow on AVX-512
too, unless the processor has AVX512-FP16. "deepspeed_c" is `init_inference` with `dtype=torch.float16`, "transformers"
the same model in fp16. The bound of the prompt is "fp32", the same products without a cast.

Every contender has a process of its own, because kernels of products act on a whole process. The contenders take turns:
a prompt, and then tokens one by one with the prompt's keys and values. The kernels have to be there in "deepspeed_c",
and nowhere else. Logits of "deepspeed_c" may be 1.1 times as far from those of "fp32" as those of "transformers" are.
Run: python -m benchmarks.hf.prompt [--rounds 3] [--prompt 512] [--layers 12] [--width 512]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import bound, in_turn, machine, median_spread, ratios, require
from benchmarks.ops.linear import AVX2
from benchmarks.served import Served, say

ROOT = Path(__file__).resolve().parents[2]
NEW, VOCAB = 8, 16000
CASES = {"avx2": AVX2, "native": {}}
MODELS = ("llama", "gpt2")
CONTENDERS = ("deepspeed_c", "transformers", "fp32")


def make(kind: str, layers: int, width: int) -> Any:
    import torch
    import transformers

    from benchmarks.hf.generate import make_model

    if kind == "llama":
        return make_model(layers, width, VOCAB)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=width, n_layer=layers, n_head=width // 64)
    return transformers.GPT2LMHeadModel(config).eval()


def serve(contender: str, options: argparse.Namespace) -> None:
    """Measure one contender on request: each line of standard input names a file for its logits."""
    import torch

    import deepspeed_c

    torch.set_num_threads(1)
    model = make(options.model, options.layers, options.width)
    n_params = model.num_parameters()
    if contender == "deepspeed_c":
        model = deepspeed_c.init_inference(model, dtype=torch.float16)
    elif contender == "transformers":
        buffers = dict(model.named_buffers())
        model = model.half()
        for name, buffer in buffers.items():  # as from_pretrained leaves them
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, VOCAB, (1, options.prompt), generator=generator)
    # The same tokens for all contenders, whichever has the greatest logit: ties of fp16 would part them.
    tokens = torch.randint(3, VOCAB, (NEW, 1, 1), generator=generator)

    @torch.no_grad()
    def run(ids: torch.Tensor, file: str | None) -> dict[str, Any]:
        begin = time.process_time()
        out = model(input_ids=ids, use_cache=True)
        ended = time.process_time()
        logits = [out.logits[0]]
        for token in tokens:
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0])
        token_s = (time.process_time() - ended) / NEW
        if file:
            torch.save(torch.cat(logits).float(), file)
        return {"prompt": ended - begin, "token": token_s}

    run(prompt[:, :8], None)
    say(
        {
            "params": n_params,
            "is_widened": torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect"),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "dtype": str(next(model.parameters()).dtype)[6:],
        }
    )
    for line in sys.stdin:
        say(run(prompt, line.strip()))
    sys.stdout.flush()
    os._exit(0)


def compare(case: str, kind: str, options: argparse.Namespace) -> None:
    import torch

    command = [sys.executable, "-m", "benchmarks.hf.prompt", "--model", kind]
    for key in ("prompt", "layers", "width"):
        command += [f"--{key}", str(getattr(options, key))]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    running: dict[str, Served] = {}
    abouts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # A new cache, so that the times of the products are measured here.
        environment = {**os.environ, **CASES[case], "XDG_CACHE_HOME": folder, "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": "1", "DSC_NUM_THREADS": "1"}
        try:
            for name in CONTENDERS:
                running[name] = Served([*command, "--serve", name], environment)
                about = abouts[name] = running[name].answer()
                require(about["is_widened"] == (name == "deepspeed_c"), f"kernels of {name}, {case}: {about}")
                require((about["isa"] == "AVX2") == (case == "avx2"), f"instructions of {name}, {case}: {about}")
                wanted = "float32" if name == "fp32" else "float16"
                require(about["dtype"] == wanted, f"{name} has weights of {wanted}: {about}")
            for round_ in range(options.rounds):
                for name in in_turn(CONTENDERS, round_):
                    running[name].ask(f"{folder}/{name}.pt")
                    found[name].append(running[name].answer())
        finally:
            for each in running.values():
                each.close()
        logits = {name: torch.load(f"{folder}/{name}.pt") for name in CONTENDERS}
    # Distances of the prompt's tokens, and of each token after it.
    far = {name: (logits[name] - logits["fp32"]).abs().mean(1) for name in ("deepspeed_c", "transformers")}
    parts = {
        name: (each[: options.prompt].mean().item(), each[options.prompt :].mean().item()) for name, each in far.items()
    }
    for ours, theirs in zip(parts["deepspeed_c"], parts["transformers"], strict=True):
        require(ours <= 1.1 * theirs, f"distances of logits from fp32, of the prompt and the tokens: {parts}")
    for name in CONTENDERS:
        line = {"benchmark": "prompt", "model": kind, "contender": name, "isa": case, "dtype": abouts[name]["dtype"]}
        line |= {"params": abouts[name]["params"], "prompt": options.prompt, "rounds": options.rounds}
        for what in ("prompt", "token"):
            mine = [each[what] for each in found[name]]
            line[f"{what}_ms"] = round(1e3 * median_spread(mine)[0], 2)
            for other in ("transformers", "fp32"):
                if other != name:
                    # Casts cost time, and a token reads half of the bytes.
                    compared = bound if (name, what, other) == ("deepspeed_c", "prompt", "fp32") else ratios
                    line |= compared(f"{what}_to_{other}", mine, [each[what] for each in found[other]])
        print(json.dumps({**line, "threads": 1, "machine": machine()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a prompt in fp16, and tokens after it.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--model", choices=MODELS, help="default: all")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    for case in [options.case] if options.case else CASES:
        for kind in [options.model] if options.model else MODELS:
            compare(case, kind, options)


if __name__ == "__main__":
    main()
