"""trl's GRPO with text from a server, at ZeRO stage 3: a stand-in for vLLM's server gets the weights of the engine
before each round, and writes with them.

vLLM needs a GPU, so three things of it are stubbed in trl's client: the question whether vLLM is installed, the group
of NCCL (``init_communicator``), and the broadcast over it, which sends tensors over HTTP here. All other requests are
those of trl, to a server that has a plain copy of the model.
"""

from __future__ import annotations

import io
import json
import math
import queue
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests import waits
from tests.hf.stack import ds_config, forget, llama, numbers, on_ranks
from tests.hf.test_trl import rows, settings, tokenizer

END = 2


class StandIn:
    """A server with vLLM's paths, around a plain Llama. ``updates`` has the weights of each update."""

    def __init__(self, model):
        self.model, self.updates, self.asked, self.errors = model, [], [], []
        self.tensors, self.random = queue.Queue(), torch.Generator().manual_seed(0)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(server.get(self.path.partition("?")[0]))

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer(server.post(self.path, body))

            def answer(self, found):
                text = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        waits.joined(self.thread)

    def get(self, path):
        self.asked.append(path)
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": "stand-in"}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
        }[path]

    def post(self, path, body):
        if path == "/tensor":  # in place of NCCL
            self.tensors.put(torch.load(io.BytesIO(body)))
            return {}
        self.asked.append(path)
        if path == "/update_weights":
            self.update(**json.loads(body)["update_info"])
        if path == "/v1/completions":
            return {"choices": self.write(**json.loads(body))}
        return {"success": True}

    def update(self, names, dtype_names, shapes):
        got = {}
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            got[name] = self.tensors.get(timeout=60)
            if str(got[name].dtype) != f"torch.{dtype}" or list(got[name].shape) != shape:
                self.errors.append((name, dtype, shape, got[name].dtype, got[name].shape))
        self.model.load_state_dict(got)
        self.updates.append(got)

    @torch.no_grad()
    def write(self, prompt, n, max_tokens, temperature, **_):
        choices = []
        for ids in (each for each in prompt for _ in range(n)):
            tokens, logprobs = list(ids), []
            while len(logprobs) < max_tokens and (not logprobs or tokens[-1] != END):
                found = (self.model(torch.tensor([tokens])).logits[0, -1] / temperature).log_softmax(-1)
                tokens.append(int(torch.multinomial(found.exp(), 1, generator=self.random)))
                logprobs.append(found[tokens[-1]].item())
            written = tokens[len(ids) :]
            labels = [f"token_id:{token}" for token in written]
            about = {"tokens": labels, "token_logprobs": logprobs, "top_logprobs": [None] * len(written)}
            choices.append({"prompt_token_ids": ids, "token_ids": written, "logprobs": about})
        return choices


def send(iterator, group, src, post_iter_func):
    """vLLM's broadcast of packed tensors, over HTTP. ``group`` is the server's address."""
    for item in iterator:
        data = io.BytesIO()
        torch.save(post_iter_func(item).detach().clone(), data)
        urllib.request.urlopen(urllib.request.Request(f"{group}/tensor", data=data.getvalue()), timeout=60).close()


def patch_client():
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):
        module.is_vllm_available = lambda *_, **__: True
    vllm_client._HAS_STATEFUL_TRAINER_ENGINE = vllm_client._HAS_RESET_PREFIX_CACHE_SUCCESS = True
    vllm_client.packed_nccl_broadcast_producer = send

    def init_communicator(client, device):
        client.communicator = client.base_url

    vllm_client.VLLMClient.init_communicator = init_communicator


def grpo(rank, world, folder, stage):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    import deepspeed_c

    forget()
    patch_client()
    writer = tokenizer()
    if rank == 0:
        llama(vocab_size=len(writer)).save_pretrained(folder / "model")
    torch.distributed.barrier()
    server = StandIn(llama(seed=5, vocab_size=len(writer)).eval()) if rank == 0 else None
    args = settings(
        GRPOConfig,
        folder,
        ds_config(stage, scheduler=False),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        max_steps=2,
        num_generations=4,
        max_completion_length=8,
        beta=0.0,
        model_init_kwargs={"dtype": "float32"},
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url if rank == 0 else "http://127.0.0.1:1",
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        args=args,
        reward_funcs=lambda completions, **_: [text.count("a") / 8 for text in completions],
        train_dataset=Dataset.from_dict({"prompt": [text[:3] for text in rows()]}),
        processing_class=writer,
    )
    differences, sync = [], VLLMGeneration.sync_weights

    def checked(generation):
        sync(generation)
        named = dict(trainer.model.named_parameters())
        with deepspeed_c.zero.GatheredParameters(list(named.values())):
            if rank == 0:
                got = server.updates[-1]
                differences.extend(name for name in named if not torch.equal(named[name].data, got[name]))
                assert set(got) == set(named), sorted(set(got) ^ set(named))

    VLLMGeneration.sync_weights = checked
    try:
        trainer.train()
    finally:
        VLLMGeneration.sync_weights = sync
        if server is not None:
            server.close()
    logs = trainer.state.log_history
    apart = [log["sampling/sampling_logp_difference/max"] for log in logs if "loss" in log]
    if rank == 0:
        changed = [not torch.equal(server.updates[0][name], server.updates[1][name]) for name in server.updates[0]]
        return numbers(trainer)["loss"], apart, differences, all(changed), server.errors, server.asked
    return numbers(trainer)["loss"], apart


@pytest.mark.parametrize("stage", [2, 3])
def test_a_server_writes_with_the_weights_of_the_engine(tmp_path, stage):
    pytest.importorskip("trl")
    (loss, apart, differences, has_changed, errors, asked), (other, _) = on_ranks(2, grpo, tmp_path, stage)
    print(loss, apart, asked)
    assert len(loss) == 2 and loss == other and all(math.isfinite(each) for each in loss)
    assert differences == [] and errors == [] and has_changed
    # The server drew with the trainer's log-probabilities.
    assert all(each < 1e-5 for each in apart), apart
    assert asked.count("/update_weights") == 2 and asked.count("/reset_prefix_cache") == 2
    assert asked.count("/start_weight_update") == asked.count("/finish_weight_update") == 2
    assert asked.count("/v1/completions") == 2
