"""A Llama of `benchmarks.hf.generate` in llama.cpp: its weights as a GGUF file, and greedy generation on request.

Runs in an environment of its own, with `pip install llama-cpp-python gguf`, which DSC_LLAMA_PYTHON names. The weights
and the configuration are files that `write_weights` has put into a folder.
Run: python -m benchmarks.hf.llama_cpp FOLDER --threads N
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.served import say

CONFIG, MODEL = "config.json", "model.gguf"
# Names in llama.cpp, by names in transformers.
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_weights(model: Any, folder: Path) -> None:
    """Write the configuration and the bf16 weights of a Llama of transformers, a file a tensor."""
    import torch

    model.config.to_json_file(folder / CONFIG, use_diff=False)
    for name, param in model.named_parameters():
        np.save(folder / f"{name}.npy", param.detach().view(torch.int16).numpy())


def read_weight(file: Path, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """(name, elements) of a tensor of llama.cpp: fp32, or the bytes of bf16."""
    name, bits = file.name.removesuffix(".weight.npy"), np.load(file).view(np.uint16)
    if name in OUTER:
        target = OUTER[name]
    else:
        _, _, index, inner = name.split(".", 3)
        target = f"blk.{index}.{INNER[inner]}"
    if bits.ndim == 1:
        return f"{target}.weight", (bits.astype(np.uint32) << 16).view(np.float32)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(target.split(".")[-1])
    if heads is not None:
        # llama.cpp turns neighbouring elements of a head by one angle, transformers the elements of its two halves.
        bits = bits.reshape(config[heads], 2, -1, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)
    return f"{target}.weight", np.ascontiguousarray(bits).view(np.uint8)


def write_gguf(folder: Path) -> None:
    import gguf

    config = json.loads((folder / CONFIG).read_text())
    writer = gguf.GGUFWriter(folder / MODEL, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(folder.glob("*.npy")):
        name, elements = read_weight(file, config)
        is_wide = elements.dtype == np.float32
        writer.add_tensor(name, elements, raw_dtype=None if is_wide else gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Generator:
    """Greedy generation of ``n_rows`` rows, as `generate` of transformers does it without an end token."""

    def __init__(self, model: Any, n_rows: int, n_tokens: int, n_threads: int) -> None:
        import llama_cpp

        self._llama, self._n_rows = llama_cpp, n_rows
        self._n_words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        # A row has a multiple of 256 places.
        params.n_ctx = n_rows * -(-n_tokens // 256) * 256
        params.n_batch = params.n_ubatch = max(512, n_rows * n_tokens)
        params.n_seq_max = n_rows
        params.n_threads = params.n_threads_batch = n_threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(n_rows * n_tokens, 0, 1)

    def run(self, prompts: list[list[int]], n_new: int, keep: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """(new tokens [rows, new], their logits [rows, new, words] if they are to be kept)."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        tokens, logits = np.empty((self._n_rows, n_new), np.int64), []
        given, first = np.array(prompts), 0
        for i in range(n_new):
            rows = self._forward(given, first)
            if keep:
                logits.append(rows.copy())
            tokens[:, i] = rows.argmax(1)
            given, first = tokens[:, i : i + 1], first + given.shape[1]
        return tokens, np.stack(logits, 1) if keep else None

    def _forward(self, ids: np.ndarray, first: int) -> np.ndarray:
        """The logits of the last token of each row."""
        batch, n_tokens = self._batch, ids.shape[1]
        batch.n_tokens = ids.size
        for at, (row, i) in enumerate(np.ndindex(ids.shape)):
            batch.token[at], batch.pos[at] = int(ids[row, i]), first + i
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            batch.logits[at] = i == n_tokens - 1
        status = self._llama.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")
        data = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), (self._n_rows, self._n_words))


def show_errors(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    import llama_cpp

    write_gguf(args.folder)
    log = llama_cpp.llama_log_callback(show_errors)
    llama_cpp.llama_log_set(log, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(args.folder / MODEL).encode(), params)
    if not model:
        raise SystemExit("llama.cpp does not read the file")
    generators: dict[tuple[int, int], Generator] = {}
    say({"version": llama_cpp.__version__, "params": llama_cpp.llama_model_n_params(model)})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, n_new = asked["prompts"], asked["n_new"]
        key = len(prompts), len(prompts[0]) + n_new
        if key not in generators:
            generators[key] = Generator(model, *key, args.threads)
        begin = time.perf_counter()
        tokens, logits = generators[key].run(prompts, n_new, bool(asked.get("logits")))
        seconds = time.perf_counter() - begin
        if logits is not None:
            np.save(asked["logits"], logits)
        say({"seconds": seconds, "tokens": tokens.tolist()})


if __name__ == "__main__":
    main()
