"""The front door: what a person with ten minutes calls, from `dt.build` to `dt.save`, without a Ctx."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import InputError, SpecError
from dovetail.proof.laws.case import perturbed
from dovetail.spec.part import KINDS
from dovetail.text.learn import learn

TINY = """
width: 24
vocab: 90
layers: [{repeat: 2, mixer: {heads: 3, kv_heads: 1, head: 8}, ffn: {hidden: 40}}]
"""
MOE = "layers.*.ffn"
TEXT = "It was the best of times, it was the worst of times — it was the age of wisdom.\n" * 20


@pytest.fixture
def model() -> dt.Transformer:
    return perturbed(dt.from_yaml(TINY), 3).float()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(1))


# -- build


def test_a_spec_is_a_name_a_path_yaml_text_a_mapping_or_a_spec(tmp_path: Path) -> None:
    spec = dt.from_yaml(TINY)
    (tmp_path / "tiny.yaml").write_text(TINY)
    for given in (spec, TINY, tmp_path / "tiny.yaml", str(tmp_path / "tiny.yaml"), spec.to_data()):
        assert dt.build(given).spec == spec
    assert dt.build("llama-tiny").spec == dt.load_spec("llama-tiny")


def test_build_takes_dtype_device_and_seed() -> None:
    for name in ("bfloat16", "bf16", torch.bfloat16):
        assert dt.build(TINY, dtype=name).dtype == torch.bfloat16
    assert dt.build(TINY, device="meta").device.type == "meta"
    one, same, other = (dt.build(TINY, seed=seed).state_dict()["embed.table"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(SpecError, match="bfloat16"):
        dt.build(TINY, dtype="bfloat")


def test_a_cast_model_equals_one_built_in_that_dtype(ids: Tensor) -> None:
    cast, built = dt.build(TINY).to(torch.bfloat16), dt.build(TINY, dtype="bfloat16")
    assert torch.equal(cast(ids), built(ids)), "constants such as rotary frequencies stay in float32"


def test_a_swap_takes_a_name_a_mapping_or_a_part() -> None:
    spec = dt.build(TINY).spec
    by_name = spec.swap("position", "alibi")
    assert by_name == spec.swap("position", {"kind": "alibi"}) == spec.swap("position", dt.parts.Alibi())
    assert isinstance(by_name.layers[0].mixer, dt.parts.Attention)
    assert by_name.layers[0].mixer.heads == 3


def test_every_class_of_our_parts_is_exported() -> None:
    for kind, cls in KINDS.items():
        if cls.__module__.startswith("dovetail.parts."):
            assert getattr(dt.parts, cls.__name__) is cls, kind


# -- logits


def test_logits_need_no_ctx(model: dt.Transformer, ids: Tensor) -> None:
    with_ctx = model(ids, dt.Ctx(layout=dt.TokenLayout.whole(2, 9)))
    assert torch.equal(model(ids), with_ctx)
    assert model(ids).shape == (2, 9, 90)


@pytest.mark.parametrize("left", [True, False])
def test_a_padded_row_equals_the_row_alone(model: dt.Transformer, ids: Tensor, left: bool) -> None:
    keep = slice(4, 9) if left else slice(0, 5)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 4) if left else slice(5, 9)] = 0
    alone = model(ids[:1, keep])[0]
    torch.testing.assert_close(model(ids, attention_mask=mask)[0, keep], alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(ids, attention_mask=mask.bool())[1], model(ids)[1], atol=1e-5, rtol=1e-4)
    if not left:
        assert torch.equal(model(ids, lengths=[5, 9]), model(ids, attention_mask=mask))


def test_learned_positions_count_from_the_first_token_behind_left_padding(ids: Tensor) -> None:
    spec = dt.from_yaml(TINY).swap("position", {"kind": "learned", "length": 16})
    model, mask = perturbed(spec, 3), torch.ones_like(ids)
    mask[0, :4] = 0
    torch.testing.assert_close(model(ids, attention_mask=mask)[0, 4:], model(ids[:1, 4:])[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1] * 3, [1] * 9])}, "row 0 has zeros between its ones"),
        ({"attention_mask": torch.ones(2, 8)}, "shape"),
        ({"attention_mask": torch.ones(2, 9), "lengths": [9, 9]}, "give one of them"),
        ({"lengths": [9, 10]}, "from 0 to 9"),
        ({"lengths": [9]}, "one per row"),
        ({"source": torch.ones(2, 3, dtype=torch.long)}, "no encoder"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(model: dt.Transformer, ids: Tensor, how: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(ids, **how)


def test_one_sequence_without_a_batch_says_how_to_add_one(model: dt.Transformer, ids: Tensor) -> None:
    with pytest.raises(InputError, match=r"ids\[None\]"):
        model(ids[0])


def test_a_ctx_excludes_other_arguments(model: dt.Transformer, ids: Tensor) -> None:
    with pytest.raises(InputError, match="pass only ctx"):
        model(ids, dt.Ctx(layout=dt.TokenLayout.whole(2, 9)), lengths=[9, 9])


def test_an_encoder_decoder_takes_a_source(ids: Tensor) -> None:
    model = dt.build("t5-tiny")
    source, mask = ids[:, :6], torch.ones(2, 6)
    mask[1, 4:] = 0
    padded = model(ids, source=source, source_mask=mask)
    torch.testing.assert_close(padded[1], model(ids[1:], source=source[1:, :4])[0], atol=1e-4, rtol=1e-4)
    assert model.loss(ids, source=source).isfinite()
    with pytest.raises(InputError, match="source"):
        model(ids)


# -- loss


def test_loss_predicts_the_next_token_of_each_row(model: dt.Transformer, ids: Tensor) -> None:
    logits = model(ids)
    by_hand = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model.loss(ids), by_hand)
    torch.testing.assert_close(model.loss(ids[:, :-1], ids[:, 1:]), by_hand)
    padded = torch.cat([ids, torch.full((2, 3), 7)], 1)
    torch.testing.assert_close(model.loss(padded, lengths=[9, 9]), by_hand)


def test_targets_that_are_the_inputs_are_an_error(model: dt.Transformer, ids: Tensor) -> None:
    with pytest.raises(InputError, match=r"model\.loss\(ids\)"):
        model.loss(ids, ids)
    assert model.loss(torch.full((1, 4), 5), torch.full((1, 4), 5)).isfinite(), "a repeated token is its own next token"


def test_padding_never_counts_in_a_loss(model: dt.Transformer, ids: Tensor) -> None:
    inputs, targets = ids[:, :-1], ids[:, 1:]
    alone = model.loss(inputs[:1, :5], targets[:1, :5])
    torch.testing.assert_close(model.loss(inputs[:1], targets[:1], lengths=[5]), alone, atol=1e-5, rtol=1e-4)


def test_a_bidirectional_model_needs_targets(ids: Tensor) -> None:
    model = dt.build(dt.from_yaml(TINY).set("layers.*.mixer.mask", "full"))
    with pytest.raises(InputError, match=r"model\.loss\(ids, targets\)"):
        model.loss(ids)
    assert model.loss(ids, ids).isfinite(), "a masked language model predicts tokens in their own place"


def test_training_mode_draws_dropout_anew_and_torch_seeds_it(ids: Tensor) -> None:
    model = dt.build(dt.from_yaml(TINY).set("layers.*.wire.dropout", 0.3))
    assert torch.equal(model.loss(ids), model.loss(ids))
    model.train()
    torch.manual_seed(5)
    first, second = model.loss(ids), model.loss(ids)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(model.loss(ids), first)
    assert torch.equal(model.loss(ids), second)


def test_training_mode_adds_router_losses(ids: Tensor) -> None:
    spec = dt.from_yaml(TINY).set(MOE, {"kind": "moe", "experts": 4, "router": {"kind": "softmax_router", "balance_loss": 0.5}})
    model = perturbed(spec, 2)
    quiet = model.loss(ids)
    assert model.train().loss(ids) > quiet
    torch.testing.assert_close(model.eval().loss(ids), quiet)


@pytest.mark.slow
def test_eight_compiled_steps_are_one_graph(ids: Tensor) -> None:
    from torch._dynamo.testing import CompileCounter

    model, count = dt.build(dt.from_yaml(TINY).set("layers.*.wire.dropout", 0.3)).train(), CompileCounter()
    step = torch.compile(model.loss, backend=count, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = step(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert count.frame_count == 1
    assert len(set(losses)) == 8


# -- generation


def test_ids_in_ids_out(model: dt.Transformer, ids: Tensor) -> None:
    prompt = ids[0, :4]
    out = model.generate(prompt, 6)
    grown = prompt
    for token in out:
        assert int(model(grown[None])[0, -1].argmax()) == token, "decoding with a KV cache takes the same tokens"
        grown = torch.cat([grown, torch.tensor([token])])
    assert list(model.generate(prompt.tolist(), 6, stream=True)) == out
    assert model.generate(prompt, 6, stop=[out[2]]) == out[: out.index(out[2]) + 1]
    with pytest.raises(InputError, match="one sequence"):
        model.generate(ids, 3)


def test_text_in_text_out_after_saving_and_loading(tmp_path: Path) -> None:
    spec = dt.from_yaml(TINY).set("vocab", 290)
    model = dt.build(spec)
    with pytest.raises(InputError, match="no tokenizer"):
        model.generate("It was", 4)
    from dovetail.decoding.generation import Vocabulary

    model.vocabulary = Vocabulary(tokenizer=learn(TEXT, 290, "byte_pair"))
    dt.save(model, tmp_path / "model")
    loaded = dt.load(tmp_path / "model", dtype="float64")
    assert loaded.dtype == torch.float64
    assert loaded.tokenizer is not None
    text = loaded.generate("It was", 8)
    assert "".join(loaded.generate("It was", 8, stream=True)) == text
    assert loaded.tokenizer.decode(loaded.generate(loaded.tokenizer.prompt("It was"), 8)).strip() == text.strip()
    again = dt.generate(loaded, "It was", max_tokens=8)
    assert again.text == text
    assert again.finish == "length"
    assert len(again.to_dict()["tokens"]) == 8
    with pytest.raises(InputError, match="chat template"):
        loaded.generate("It was", 4, chat=True)


# -- traces


def test_a_trace_is_a_dict_of_activations(model: dt.Transformer, ids: Tensor) -> None:
    acts = model.trace(ids, "layers.*.mixer.pattern", "head.logits")
    assert [*acts] == ["layers.0.mixer.pattern", "layers.1.mixer.pattern", "head.logits"]
    assert acts["layers.0.mixer.pattern"].shape == (2, 3, 9, 9)
    torch.testing.assert_close(acts["head.logits"], model(ids), atol=1e-5, rtol=1e-4)
    with pytest.raises(SpecError, match="did you mean"):
        model.trace(ids, "layers.*.mixer.patern")


def test_a_trace_with_gradients_gives_attributions(model: dt.Transformer, ids: Tensor) -> None:
    acts = model.trace(ids, "embedded", "head.logits", grad=True)
    acts["head.logits"][0, 4, 7].backward()
    grad = acts["embedded"].grad
    assert grad is not None
    assert grad[0, :5].abs().sum() > 0
    assert grad[0, 5:].abs().sum() == 0, "later tokens have no part in it"
    assert grad[1].abs().sum() == 0


def test_a_patch_replaces_activations(model: dt.Transformer, ids: Tensor) -> None:
    clean = model.trace(ids, "layers.0.after_ffn", "head.logits")
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 1) % 90
    patched = model.trace(other, "head.logits", patch={"layers.0.after_ffn": clean["layers.0.after_ffn"]})
    torch.testing.assert_close(patched["head.logits"], clean["head.logits"])
    without = model.trace(ids, "layers.1.mixer_add", "head.logits", patch={"layers.*.mixer_add": 0.0})
    assert without["layers.1.mixer_add"].abs().max() == 0, "the trace holds the replaced value"
    doubled = model.trace(ids, "head.logits", patch={"head.logits": lambda x: 2 * x})
    torch.testing.assert_close(doubled["head.logits"], 2 * clean["head.logits"])
    with pytest.raises(InputError, match="shape"):
        model.trace(ids, "head.logits", patch={"embedded": torch.zeros(3)})
    with pytest.raises(SpecError, match="no tap"):
        model.trace(ids, "head.logits", patch={"layers.9.mixer_add": 0.0})


# -- readable


def test_reprs_are_readable(model: dt.Transformer) -> None:
    assert dt.from_yaml(repr(model.spec)) == model.spec
    assert repr(model.spec.layers[0].mixer) == "Attention(heads=3, kv_heads=1, head=8)"
    assert "kv_heads=1" in repr(model)
    assert "eps=1e-05" in repr(model)
