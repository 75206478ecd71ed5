"""Decoder: eager and compiled steps are one function, and weights that change after they were compiled are noticed."""

import pytest
import torch

from dovetail import build, load_spec
from dovetail.base.errors import InputError, StateError
from dovetail.decoding.steps import Decoder, Unchanged
from dovetail.nn.ranks import Ranks
from dovetail.state.pool import Pool
from dovetail.weights.adapters.attach import attach, detach


def decoder_of(model, compiled=False, rows=2):
    return Decoder(model, Pool(model.spec, rows, 40), compiled=compiled)


@torch.no_grad()
def decoded(decoder, ids, prompt):
    """The logits after the prompt and after each further token."""
    rows = range(len(ids))
    pieces = [decoder.step(ids[:, :prompt], rows)]
    return torch.stack([*pieces, *(decoder.step(ids[:, i : i + 1], rows) for i in range(prompt, ids.shape[1]))], 1)


def test_steps_equal_the_whole_pass():
    model = build("llama-tiny")
    ids = torch.randint(model.spec.vocab, (2, 9))
    with torch.no_grad():
        whole = model(ids)[:, 4:]
    torch.testing.assert_close(decoded(decoder_of(model), ids, 5), whole)


def test_a_decoder_that_is_not_compiled_has_nothing_to_warm_up():
    assert decoder_of(build("llama-tiny")).warm_up([0]) == 0.0


def test_a_slice_of_tokens_has_the_strides_that_were_compiled():
    model, seen = build("llama-tiny"), []
    decoder = decoder_of(model)
    decoder._compiled = lambda tokens, ctx: seen.append(tokens.stride()) or torch.zeros(1, 1, 2)
    decoder.step(torch.zeros(1, 5, dtype=torch.long)[:, :1], [0])
    decoder.step(torch.zeros(1, 1, dtype=torch.long), [0])
    assert seen == [(1, 1), (1, 1)]


def test_every_change_of_a_model_is_noticed():
    model = build("llama-tiny")
    unchanged, block = Unchanged(model), model.layers[2]
    assert unchanged()
    for change, back in (
        (lambda: attach(model, "lora"), lambda: detach(model)),
        (lambda: setattr(block, "ffn", model.layers[1].ffn), lambda ffn=block.ffn: setattr(block, "ffn", ffn)),
        (
            lambda: setattr(block.mixer.q, "weight", torch.nn.Parameter(block.mixer.q.weight.detach())),
            lambda weight=block.mixer.q.weight: setattr(block.mixer.q, "weight", weight),
        ),
    ):
        change()
        assert not unchanged()
        back()
        assert unchanged()
    hook = block.mixer.o.register_forward_hook(lambda *given: None)
    assert not unchanged()
    hook.remove()
    assert unchanged()
    with torch.no_grad():
        block.ffn.up.weight.mul_(2)
    assert not unchanged()


def test_decoding_has_no_dropout_in_any_mode():
    model, ids = build(load_spec("llama-tiny").set("dropout", 0.5)), torch.arange(6)[None]
    expected = decoder_of(model).step(ids, [0])
    assert torch.equal(decoder_of(model.train()).step(ids, [0]), expected)
    assert model.training


@pytest.mark.slow
def test_models_of_one_shape_have_graphs_of_their_own(monkeypatch):
    own = torch.compile

    def traced(step, fullgraph, options):
        return own(step, backend="eager", fullgraph=fullgraph, options={"guard_filter_fn": options["guard_filter_fn"]})

    monkeypatch.setattr(torch, "compile", traced)
    torch.compiler.reset()
    models = [build("llama-tiny", seed=seed) for seed in (0, 1)]
    ids = torch.randint(models[0].spec.vocab, (2, 9))
    for model in models:
        want = decoded(decoder_of(model), ids, 5)
        torch.testing.assert_close(decoded(decoder_of(model, compiled=True), ids, 5), want)


def test_a_sharded_model_is_not_compiled():
    model = build("llama-tiny")
    model.ranks = Ranks(object())
    with pytest.raises(InputError, match="compiled: a model that is sharded"):
        decoder_of(model, compiled=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # freezing uses it
@pytest.mark.parametrize("name", ["llama-tiny", "jamba-tiny"])
def test_compiled_steps_equal_eager_ones_until_the_weights_change(name):
    model = build(name)
    ids = torch.randint(model.spec.vocab, (2, 12))
    compiled = decoder_of(model, compiled=True)
    want = decoded(decoder_of(model), ids, 5)
    with torch.no_grad():
        compiled.step(ids[:, :3], [0, 1])
    assert compiled.warm_up([0, 1]) > 0
    assert compiled.pool.lengths == [3, 3]
    assert compiled.pool.marks == [[], []]
    for row in (0, 1):
        compiled.pool.free(row)
    torch.testing.assert_close(decoded(compiled, ids, 5), want, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
        with pytest.raises(StateError, match="the weights, modules or hooks have changed"):
            compiled.step(ids[:, :1], [0, 1])
