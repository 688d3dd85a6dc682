"""Layers of compressed-tensors that transformers loads as packed integers: frozen under trained layers, at each ZeRO
stage, with the losses of one process in plain torch."""

from __future__ import annotations

import json

import pytest
import torch

import deepspeed_c
from deepspeed_c.errors import FeatureError
from deepspeed_c.launcher.main import main
from tests.hf.stack import VOCAB, forget, llama, on_ranks
from tests.training import config

pytest.importorskip("compressed_tensors")

STEPS, ROWS = 3, 4
SHARED = {"enabled": True, "quantize_weight_in_forward": True, "quantize_groups": 8, "schedule_offset": 0}
GROUPS = {"all": {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["_proj"]}}
SECTION = {"weight_quantization": {"shared_parameters": SHARED, "different_groups": GROUPS}}


def load(folder):
    """The packed model, of which the norms and the output layer train."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    for name, param in model.named_parameters():
        param.requires_grad_(param.is_floating_point() and ("norm" in name or "lm_head" in name))
    return model


def tokens():
    return torch.randint(3, VOCAB, (ROWS, 12), generator=torch.Generator().manual_seed(3))


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def train(rank, world, folder, saved):
    """Losses of each stage on these ranks. Two ranks save after a step, and one rank goes on from there."""
    ids = tokens().chunk(world)[rank]
    found = []
    for stage in range(4):
        forget()
        zero = {"stage3_param_persistence_threshold": 0}
        how = {"lr": 1e-2, "params": {"weight_decay": 0.0}, "gradient_clipping": 0.0}
        settings = config(stage, "AdamW", rows=ROWS // world, zero=zero, **how)
        model = load(folder)
        engine, *_ = deepspeed_c.initialize(model=model, model_parameters=trained(model), config=settings)

        def step(engine=engine):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return mean(loss)

        losses = []
        if world == 1:
            engine.load_checkpoint(saved / str(stage))
        for _ in range(STEPS if world == 2 else STEPS - 1):
            losses.append(step())
            if world == 2 and len(losses) == 1:
                engine.save_checkpoint(saved / str(stage))
        found.append(losses)
        engine.close()
    return found


def mean(loss):
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def packed(tmp_path):
    """A folder with packed weights of 4 bits."""
    llama(hidden_size=32, intermediate_size=64).save_pretrained(tmp_path / "plain")
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 4, "compression_training": SECTION}))
    folder = tmp_path / "packed"
    assert not main(
        ["compress", "export", "--config", str(tmp_path / "config.json"), str(tmp_path / "plain"), str(folder)]
    )
    return folder


def test_packed_layers_train_as_in_one_process(tmp_path):
    folder = packed(tmp_path)
    model = load(folder)
    assert sum(param.dtype == torch.int32 for param in model.parameters()) == 2 * 7, "packed layers"
    optimizer, expected = torch.optim.AdamW(trained(model), lr=1e-2, weight_decay=0.0), []
    for _ in range(STEPS):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for world in (2, 1):
        found = on_ranks(world, train, folder, tmp_path / "saved")[0]
        print(world, found, expected)
        for losses in found:
            assert losses == pytest.approx(expected[-len(losses) :], rel=1e-5)


def refuse(rank, world, folder):
    settings = config(3, rows=1, zero={"stage3_param_persistence_threshold": 0})
    model = load(folder)
    deepspeed_c.zero.Init(module=model, config_dict_or_path=settings)
    with pytest.raises(FeatureError) as info:
        deepspeed_c.initialize(model=model, model_parameters=trained(model), config=settings)
    return str(info.value)


def test_packed_layers_that_are_sharded_already_are_refused(tmp_path):
    for text in on_ranks(2, refuse, packed(tmp_path)):
        assert "weight_packed" in text and "dequantize=True" in text, text
