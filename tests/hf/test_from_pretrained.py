"""Models of transformers that are made and loaded under stage 3.

Each rank holds a shard from the start, and the gathered weights equal the weights without DeepSpeed.
"""

from __future__ import annotations

import pytest
import torch

from tests.hf.stack import VOCAB, WIDTH, ds_config, forget, llama, llama_config, numbers, on_ranks, weights

MISSING = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def stage3(**changes):
    """Turns stage 3 on without a Trainer, with a value for each "auto".

    Stage 3 stays on as long as the returned object lives.
    """
    from transformers.integrations import HfDeepSpeedConfig

    forget()
    return HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **changes})


def whole(model):
    """The state of a sharded model, gathered. Collective."""
    from deepspeed.zero import GatheredParameters

    with GatheredParameters(
        model.state_dict(keep_vars=True).values()
    ):  # parameters and buffers, as transformers passes them
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_sharded(model, world):
    for name, param in model.named_parameters():
        assert param.ds_status.name == "NOT_AVAILABLE", name
        assert param.ds_numel == param.ds_shape.numel() == param.numel() > 0, name
        assert param.ds_tensor.numel() <= -(-param.ds_numel // world), name


def write_model(rank, world, folder, changes, without=()):
    from safetensors.torch import save_file

    forget()
    model = llama(seed=3, **changes)
    model.save_pretrained(folder, max_shard_size="5KB")
    if without:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        state = {name: value for name, value in model.state_dict().items() if name not in without}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    return model.state_dict()


def load(rank, world, folder, changes):
    from transformers import LlamaForCausalLM

    config = stage3(**changes)
    model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert_sharded(model, world)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    del config
    return whole(model), buffers, sorted(info["missing_keys"]), is_tied


@pytest.mark.parametrize("is_tied", [False, True])
def test_loaded_weights_are_those_of_the_files(tmp_path, is_tied):
    expected = on_ranks(1, write_model, tmp_path, {"tie_word_embeddings": is_tied})[0]
    for state, _, missing, tied in on_ranks(2, load, tmp_path, {}):
        assert missing == [] and tied == is_tied
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def test_weights_take_the_configurations_dtype_and_buffers_keep_theirs(tmp_path):
    expected = on_ranks(1, write_model, tmp_path, {})[0]
    state, buffers, _, _ = on_ranks(2, load, tmp_path, {"bf16": {"enabled": True}})[0]
    for name, value in expected.items():
        assert torch.equal(state[name], value.bfloat16()), name
    from_scratch = on_ranks(1, rotary_of_plain_model)[0]
    assert buffers.keys() == from_scratch.keys() and len(buffers) > 0
    for name, value in from_scratch.items():
        assert buffers[name].dtype == value.dtype == torch.float32
        assert torch.equal(buffers[name], value), name


def rotary_of_plain_model(rank, world):
    forget()
    return {name: buffer.clone() for name, buffer in llama().named_buffers()}


def test_what_a_checkpoint_lacks_is_initialised_alike_on_all_ranks(tmp_path):
    expected = on_ranks(1, write_model, tmp_path, {}, MISSING)[0]
    (first, _, missing, _), (second, *_) = on_ranks(2, load, tmp_path, {})
    assert missing == sorted(MISSING)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        assert name in MISSING or torch.equal(first[name], value), name
    assert first["model.norm.weight"].tolist() == [1.0] * WIDTH
    made = first["model.layers.1.mlp.up_proj.weight"]
    assert made.std().item() == pytest.approx(0.02, rel=0.15) and abs(made.mean().item()) < 0.003


def load_in_context(rank, world, folder):
    """Loads under ``zero.Init`` alone: transformers does not know of stage 3."""
    from deepspeed.zero import Init
    from transformers import LlamaForCausalLM

    forget()
    with Init():
        model, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert_sharded(model, world)
    return whole(model), sorted(info["missing_keys"]), model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("is_tied, without", [(False, MISSING), (True, ())])
def test_a_model_loaded_within_a_context_is_sharded_as_it_comes(tmp_path, is_tied, without):
    expected = on_ranks(1, write_model, tmp_path, {"tie_word_embeddings": is_tied}, without)[0]
    (first, missing, tied), (second, *_) = on_ranks(2, load_in_context, tmp_path)
    assert missing == sorted(without) and tied == is_tied and first.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        assert name in without or torch.equal(first[name], value), name
    if without:
        made = first["model.layers.1.mlp.up_proj.weight"]
        assert (
            made.std().item() == pytest.approx(0.02, rel=0.15) and first["model.norm.weight"].tolist() == [1.0] * WIDTH
        )


def make_from_config(rank, world):
    from transformers import AutoModelForCausalLM

    config = stage3()
    model = AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True))
    assert_sharded(model, world)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    del config
    return whole(model)


def test_a_model_made_from_a_config_is_initialised():
    first, second = on_ranks(2, make_from_config)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        if value.dim() == 1:
            assert value.tolist() == [1.0] * len(value), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.15), name


def resize(rank, world, folder, n_tokens, mean):
    from transformers import LlamaForCausalLM

    config = stage3()
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(n_tokens, mean_resizing=mean)
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    del config
    return whole(model), is_tied, model.config.vocab_size


@pytest.mark.parametrize(
    "is_tied, n_tokens, mean", [(False, VOCAB + 7, False), (True, VOCAB + 7, True), (False, VOCAB - 9, False)]
)
def test_embeddings_are_resized(tmp_path, is_tied, n_tokens, mean):
    expected = on_ranks(1, write_model, tmp_path, {"tie_word_embeddings": is_tied})[0]
    (first, tied, size), (second, *_) = on_ranks(2, resize, tmp_path, n_tokens, mean)
    assert tied == is_tied and size == n_tokens
    kept = min(n_tokens, VOCAB)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        if "embed_tokens" in name or "lm_head" in name:
            assert first[name].shape == (n_tokens, WIDTH), name
            assert torch.equal(first[name][:kept], value[:kept]), name
            assert first[name][1:].abs().sum(1).min() > 0, name  # row 0 is padding
        else:
            assert torch.equal(first[name], value), name


def resize_and_train(rank, world, folder, deepspeed, source):
    """Follows the order of a user's script: first the arguments, then the model, then the Trainer."""
    from transformers import LlamaForCausalLM, Trainer

    from tests.hf.stack import Text, arguments

    forget()
    args = arguments(folder, deepspeed, max_steps=3)
    model = LlamaForCausalLM.from_pretrained(source)
    torch.manual_seed(11)
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    rows = model.get_input_embeddings().weight, model.lm_head.weight
    from deepspeed.zero import GatheredParameters

    with GatheredParameters(rows, modifier_rank=0), torch.no_grad():
        for row in rows:
            row[VOCAB:] = 0.01  # not random: draws differ with and without sharding
    trainer = Trainer(model=model, args=args, train_dataset=Text())
    trainer.train()
    return numbers(trainer), weights(trainer)


def test_a_loaded_and_resized_model_trains_as_without_deepspeed(tmp_path):
    on_ranks(1, write_model, tmp_path / "source", {})
    found, expected = (
        on_ranks(2, resize_and_train, tmp_path, config, tmp_path / "source")[0]
        for config in (ds_config(3, scheduler=False), None)
    )
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=2e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# ---- buffers -------------------------------------------------------------------------------------------------------


def buffered_model():
    """A model class with a saved buffer, an unsaved buffer, and an integer buffer."""
    from transformers import PreTrainedConfig, PreTrainedModel

    class Config(PreTrainedConfig):
        model_type = "buffered"

    class Buffered(PreTrainedModel):
        config_class = Config
        base_model_prefix = "net"

        def __init__(self, config):
            super().__init__(config)
            self.lin = torch.nn.Linear(6, 6)
            self.norm = torch.nn.BatchNorm1d(6)
            self.register_buffer("scale", torch.full((3,), 1.5))
            self.register_buffer("table", torch.arange(4.0), persistent=False)
            self.post_init()

        def _init_weights(self, module):
            super()._init_weights(module)
            if module is self:
                module.table.copy_(torch.arange(4.0))

    return Buffered, Config()


def save_buffered(rank, world, folder):
    forget()
    cls, config = buffered_model()
    model = cls(config)
    with torch.no_grad():
        model.norm.running_mean.copy_(torch.arange(6.0))
        model.norm.num_batches_tracked.fill_(41)
        model.scale.fill_(7.0)
    model.save_pretrained(folder)
    return model.state_dict()


def load_buffered(rank, world, folder):
    config = stage3(bf16={"enabled": True})
    cls, _ = buffered_model()
    model = cls.from_pretrained(folder)
    assert_sharded(model, world)
    del config
    return whole(model), model.table.clone()


def test_buffers_are_loaded_on_all_ranks(tmp_path):
    expected = on_ranks(1, save_buffered, tmp_path)[0]
    for state, table in on_ranks(2, load_buffered, tmp_path):
        for name, value in expected.items():
            assert torch.equal(state[name].float(), value.bfloat16().float()), name
        assert state["norm.num_batches_tracked"].item() == 41
        assert table.tolist() == [0.0, 1.0, 2.0, 3.0]
