"""Models of transformers whose MLPs and loss run in tiles automatically, compared with the same models without tiles."""

from __future__ import annotations

import pytest
import torch

from tests import ranks
from tests.hf.stack import PRELOAD, WIDTH, Text, llama, on_ranks
from tests.hf.test_sequence import cell, check, plain, train
from tests.training import config, engine_of, update

ROWS = slice(0, 3)


def prepare(n_elems=200):
    from deepspeed_c.sequence import tiles_auto

    tiles_auto.LOGITS_ELEMS = n_elems
    tiles_auto.tiles_of_mlp = lambda n_tokens, width: 5
    return tiles_auto


def forward_and_backward(model, batch):
    model.zero_grad()
    output = model(**batch)
    (output.loss * 3).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_as_whole(rank, world, kind):
    tiles_auto = prepare()
    batch = Text().batch(0, 3)
    if kind == "items":
        batch["num_items_in_batch"] = torch.tensor(11)
    if kind == "shifted":
        batch["shift_labels"] = batch.pop("labels")
        batch["labels"] = batch["shift_labels"]
    model = llama(tie_word_embeddings=kind == "tied").double()
    if kind == "peft":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(
            model, LoraConfig(target_modules=["up_proj", "lm_head", "q_proj"], init_lora_weights=False)
        )
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
    model.train()
    whole, expected = forward_and_backward(model, batch)
    tiled = tiles_auto.tile_model(model)
    assert tiled.n_mlps == 2 and tiled.has_loss
    calls = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (
            calls.append(args[0].shape) if type(module).__name__ == "Linear" and args[0].dim() == 3 else None
        )
    )
    output, found = forward_and_backward(model, batch)
    hook.remove()
    assert any(shape[1] < 12 for shape in calls), calls
    assert type(output.logits) is tiles_auto.PromisedLogits and not output.logits.is_computed
    torch.testing.assert_close(output.loss.double(), whole.loss.double(), rtol=1e-7, atol=1e-7)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-7)
    assert output.logits.shape == whole.logits.shape and not output.logits.is_computed
    torch.testing.assert_close(output.logits + 0, whole.logits)
    assert torch.equal(output.logits.argmax(-1), whole.logits.argmax(-1))
    model.eval()
    with torch.no_grad():
        evaluated = model(**batch)
    assert type(evaluated.logits) is torch.Tensor
    assert model.generate(input_ids=batch["input_ids"], max_new_tokens=3, do_sample=False).shape == (3, 15)
    model.train()
    tiled.close()
    output, _ = forward_and_backward(model, batch)
    assert type(output.logits) is torch.Tensor
    assert "forward" not in next(m for m in model.modules() if type(m).__name__ == "LlamaMLP").__dict__
    return True


@pytest.mark.parametrize("kind", ["plain", "tied", "items", "shifted", "peft", "checkpointing"])
def test_a_llama_in_tiles_is_the_whole_one(kind):
    assert all(on_ranks(1, same_as_whole, kind))


def engine_losses(rank, world, stage, tiles):

    tiles_auto = prepare()
    model = llama()
    promised = []
    of = tiles_auto.PromisedLogits.of
    tiles_auto.PromisedLogits.of = classmethod(lambda cls, *args: promised.append(1) or of(*args))
    settings = config(
        stage,
        rows=2,
        lr=0.2,
        zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": WIDTH * WIDTH},
        sequence_parallel={"tiles": tiles, "offload_activations": True},
        activation_checkpointing={"layers": "repeated"},
    )
    engine = engine_of(model, settings)
    losses = []
    for step in range(4):
        begin = 4 * step + 2 * rank
        losses.append(update(engine, engine(**Text().batch(begin, begin + 2)).loss))
    assert bool(promised) == (tiles == "auto")
    assert engine._blocks.recomputer.stash is not None
    engine.close()
    tiles_auto.PromisedLogits.of = of
    assert all("forward" not in module.__dict__ for module in model.modules())
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_engines_train_as_without_tiles(stage):
    for found, expected in zip(on_ranks(2, engine_losses, stage, "auto"), on_ranks(2, engine_losses, stage, "off")):
        assert found == pytest.approx(expected, rel=1e-5)


IN_TILES = {way: {"sequence_parallel": {"attention": way, "tiles": "auto"}} for way in ("ulysses", "ring")}
TILED = [
    cell("grouped", "tail", "gathered", 1, 0.0, 3, config=IN_TILES["ulysses"]),
    cell("single", "packed", "model's own", 2, 0.1, 1, config=IN_TILES["ulysses"]),
    cell("grouped", "padded", "weighted", 1, 0.0, 2, config=IN_TILES["ring"]),
    cell("grouped", "plain", "model's own", 1, 0.1, 3, config=IN_TILES["ring"], checkpointing="other"),
]


def train_in_tiles(rank, world):
    tiles_auto = prepare()
    promised, of = [], tiles_auto.PromisedLogits.of
    tiles_auto.PromisedLogits.of = classmethod(lambda cls, *args: promised.append(1) or of(*args))
    found = [train(rank, world, world, [each])[0][:2] for each in TILED]
    tiles_auto.PromisedLogits.of = of
    return found, len(promised)


def test_tiles_of_cut_sequences_train_as_one_plain_process():
    everyone = on_ranks(2, train_in_tiles)
    for i, each in enumerate(TILED):
        weights, norms = plain(each["model"], each["case"], each["gas"], each["clip"])
        for of_rank, n_promised in everyone:
            assert n_promised >= 2 * sum(other["gas"] for other in TILED)
            check(each, of_rank[i], weights, norms)


TENSOR_CELLS = [
    # stage, accumulation, tied embeddings, further keys of tensor_parallel, further sections, options of the loss
    # (transformers ignores unknown options)
    (0, 1, False, {}, {}, {}),
    (1, 2, True, {}, {}, {}),
    (3, 1, False, {"tp_overlap_comm": True}, {}, {"num_items_in_batch": 13}),
    (2, 1, False, {}, {"activation_checkpointing": {"layers": "auto"}}, {"label_smoothing": 0.1}),
    (0, 1, False, {"sequence_parallel_norms": True}, {}, {}),
]


def shared_by_tensor_ranks(rank, world):
    """Compares weights after steps of SGD, and logits, between tensor parallelism with a tiled loss and a plain
    process.
    """
    from tests.deepspeed_c.zero.test_tensor_parallel import logical

    tiles_auto = prepare(n_elems=60)
    worst, promised, of = [], [], tiles_auto.PromisedLogits.of
    tiles_auto.PromisedLogits.of = classmethod(lambda cls, *args: promised.append(1) or of(*args))
    for stage, gas, is_tied, section, more, options in TENSOR_CELLS:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
            "sequence_parallel": {"tiles": "auto"},
            "tensor_parallel": {"autotp_size": 2, **section},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **more,
        }
        model, want = llama(tie_word_embeddings=is_tied), llama(tie_word_embeddings=is_tied).train()
        engine = engine_of(model, config)
        optimizer = torch.optim.SGD(want.parameters(), lr=0.2)
        del promised[:]
        for step in range(3):
            for micro in range(gas):
                batch = Text().batch(2 * (gas * step + micro), 2 * (gas * step + micro) + 2)
                expected = want(**batch, **options).loss
                (expected / gas).backward()
                output = engine(**batch, **options)
                assert type(output.logits) is tiles_auto.PromisedLogits and not output.logits.is_computed
                assert abs(output.loss.item() - expected.item()) < 1e-5, (
                    stage,
                    section,
                    options,
                    output.loss.item(),
                    expected.item(),
                )
                update(engine, output.loss)
            optimizer.step()
            optimizer.zero_grad()
        assert len(promised) == 3 * gas
        found = logical(engine)
        worst.append(max((found[name] - p.detach()).abs().max().item() for name, p in want.named_parameters()))
        # Code that reads the logits gets the whole logits, in training and in evaluation.
        output, whole = engine(**batch), want(**batch).logits.detach()
        assert output.logits.shape == whole.shape
        torch.testing.assert_close(output.logits.detach() + 0, whole, rtol=1e-4, atol=1e-4)
        engine.eval()
        with torch.no_grad():
            evaluated = engine(**batch)
        assert type(evaluated.logits) is torch.Tensor
        torch.testing.assert_close(evaluated.logits, whole, rtol=1e-4, atol=1e-4)
        engine.close()
        assert "forward" not in vars(model.lm_head)
    tiles_auto.PromisedLogits.of = of
    return worst


def test_tensor_parallel_ranks_share_a_tiled_loss():
    for worst in on_ranks(2, shared_by_tensor_ranks):
        assert max(worst) < 3e-6, worst


@ranks.on_ranks(2, preload=PRELOAD)
def test_models_whose_loss_cannot_be_shared_are_refused_by_name(rank, world):
    """A model whose loss is not split over the tensor-parallel ranks."""
    import deepspeed_c
    from deepspeed_c.errors import ModelError

    settings = config(rows=2, lr=0.2, sequence_parallel={"tiles": "auto"}, tensor_parallel={"autotp_size": 2})
    with pytest.raises(ModelError, match="LlamaModel is cut over 2 tensor-parallel ranks"):
        deepspeed_c.initialize(model=llama().model, config=settings)


def nothing_to_tile(rank, world):
    from deepspeed_c.errors import ModelError

    tiles_auto = prepare()
    with pytest.raises(ModelError, match="Sequential has no MLP"):
        tiles_auto.tile_model(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    return tiles_auto._is_mlp(torch.nn.Linear(3, 3))


def test_models_without_anything_to_tile_are_refused():
    assert on_ranks(1, nothing_to_tile) == [False]
