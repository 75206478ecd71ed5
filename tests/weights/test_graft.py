"""graft: every operation on a small model, the tensors that stay bit-equal and the new ones.

Sizes are all different: width 28, 6 heads of 12, 2 groups, ffn 44, vocabulary 62.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.files.spec import changed, from_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import declared
from dovetail.weights.surgery import diff, parse_picks, picked
from dovetail.weights.surgery.transfer import graft

SMALL = """
width: 28
vocab: 62
layers:
- repeat: 4
  mixer: {heads: 6, kv_heads: 6, head: 12}
  ffn: {hidden: 44}
head: {kind: lm, tied: true}
"""
SHARED = SMALL.replace("head: 12}", "head: 12, position: {kind: t5_bias, buckets: 8, max_distance: 16}}")
YARN = "layers.*.mixer.position.scaling={kind: yarn, factor: 4, original: 16}"
WINDOW = "layers.*.mixer.mask=[causal, {kind: window, size: 5, keep: 2}]"


def random_model(of: str = SMALL, dtype: torch.dtype = torch.float32) -> ModelModule:
    """Every weight has random numbers of its own, so that no two are equal by initialization."""
    model = build(from_yaml(of), dtype=dtype)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=draw).to(dtype))
    return model


def stored(model: ModelModule) -> dict[str, Tensor]:
    return {d.path: tensor_at(model, d.path).detach() for d in declared(model.part) if d.weight.stored}


def logits(model: ModelModule, n: int = 23) -> Tensor:
    tokens = torch.randint(0, 62, (2, n), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(tokens, Ctx(layout=TokenLayout.whole(2, n)))


# -- layers picked --------------------------------------------------------------------------------------------------


def test_runs_and_numbers_of_layers() -> None:
    assert parse_picks("0-3, 3,5", 6) == (0, 1, 2, 3, 3, 5)
    assert parse_picks("2-0", 3) == (2, 1, 0)


@pytest.mark.parametrize("text", ["", "0-", "a", "0,,1", "-1", "0-6", "9", "0-3:2", "1" * 30])
def test_illegal_layers(text: str) -> None:
    with pytest.raises(SpecError, match="layers: "):
        parse_picks(text, 6)


def test_no_text_asks_for_a_million_layers() -> None:
    with pytest.raises(SpecError, match="more than 2048"):
        parse_picks(",".join(["0-999"] * 5), 1000)


@pytest.mark.parametrize("of", [SMALL, SHARED])
@pytest.mark.parametrize("picks", [(0, 1, 1, 2, 3), (0, 3), (1, 2, 3), (3, 0, 2, 1, 0, 0)])
def test_a_layer_is_the_layer_it_was_taken_from(of: str, picks: tuple[int, ...]) -> None:
    """Dropped, repeated, and in another order: the new model is the old one's layers run in that order."""
    model = random_model(of)
    made, found = graft(model, picked(model.part, picks), picks=picks)
    before, after = stored(model), stored(made)
    for path, tensor in after.items():
        _, number, *rest = [*path.split("."), ""]
        if not path.startswith("layers."):
            assert torch.equal(tensor, before[path])
        elif "position" not in path:
            assert torch.equal(tensor, before[".".join(["layers", str(picks[int(number)]), *rest[:-1]])])
    gone = {int(row.a.split(".")[1]) for row in found.tensors if row.status == "dropped" and row.a}
    assert gone == set(range(4)) - set(picks)
    assert not {"new", "impossible"} & {row.status for row in found.tensors}
    layers, tokens = [model.layers[i] for i in picks], torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        ctx = Ctx(layout=TokenLayout.whole(2, 10))
        x, _ = model.embed(tokens, ctx)
        for layer in layers:
            x = layer(x, ctx, {})
        torch.testing.assert_close(made(tokens, ctx), model.head(model.norm(x, ctx), ctx), rtol=0, atol=1e-6)


def test_a_layer_taken_twice_is_two_layers() -> None:
    model = random_model()
    made, _ = graft(model, picked(model.part, (0, 1, 1)), picks=(0, 1, 1))
    with torch.no_grad():
        made.layers[2].ffn.up.weight.zero_()
    assert made.layers[1].ffn.up.weight.abs().sum() > 0
    assert model.layers[1].ffn.up.weight.abs().sum() > 0


def test_picked_layers_may_change_too() -> None:
    """A repeated layer with fewer groups: its keys are the means of the layer it was taken from."""
    model, picks = random_model(), (0, 1, 2, 3, 3)
    made, found = graft(model, changed(picked(model.part, picks), ["layers.4.mixer.kv_heads=2"]), picks=picks)
    row = next(row for row in found.tensors if row.b == "layers.4.mixer.k.weight")
    assert (row.a, row.status) == ("layers.3.mixer.k.weight", "transformed")
    assert row.how == "taken from another layer; kv_heads 6 → 2: the mean of every 3"
    old = model.layers[3].mixer.k.weight.reshape(2, 3, 12, 28).mean(1)
    torch.testing.assert_close(made.layers[4].mixer.k.weight, old.reshape(24, 28))


def test_as_many_layers_are_picked_as_there_are() -> None:
    spec = from_yaml(SMALL)
    with pytest.raises(SpecError, match=r"layers: 3 layers are picked, but the spec has 4"):
        diff(spec, spec, (0, 1, 2))
    assert [c.path for c in diff(spec, picked(spec, (0, 2)), (0, 2)).change] == ["layers"]
    assert diff(spec, spec, (0, 1, 2, 3)).summary["kept"] == len(diff(spec, spec).tensors)


# -- the other surgeries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [YARN, WINDOW])
def test_a_reinterpretation_changes_no_weight(change: str) -> None:
    model = random_model()
    made, found = graft(model, changed(model.part, [change]))
    before, after = stored(model), stored(made)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[path], before[path]) for path in before)
    assert {row.status for row in found.tensors} == {"kept", "reinterpreted"}
    assert not torch.equal(logits(made), logits(model))


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    model = random_model()
    made, _ = graft(model, changed(model.part, [WINDOW.replace("size: 5", "size: 23")]))
    torch.testing.assert_close(logits(made), logits(model), rtol=0, atol=1e-5)


def test_pooled_heads_are_means() -> None:
    model = random_model()
    made, found = graft(model, changed(model.part, ["layers.*.mixer.kv_heads=3"]))
    for path, tensor in stored(made).items():
        old = tensor_at(model, path).detach()
        if path.endswith(("k.weight", "v.weight")):
            assert torch.equal(tensor, old.reshape(3, 2, 12, 28).mean(1).reshape(36, 28))
        else:
            assert torch.equal(tensor, old)
    assert found.summary["transformed"] == 8


@pytest.mark.parametrize("vocab", [70, 51])
def test_a_vocabulary_keeps_its_rows(vocab: int) -> None:
    model = random_model()
    made, _ = graft(model, changed(model.part, [f"vocab={vocab}"]), seed=5)
    both = min(vocab, 62)
    assert torch.equal(made.embed.table[:both], model.embed.table[:both])
    assert torch.equal(made.embed.table[both:], build(made.part, seed=5).embed.table[both:])
    assert made.head.out.weight is made.embed.table


def test_an_untied_head_starts_equal() -> None:
    model = random_model()
    made, _ = graft(model, changed(model.part, ["head.tied=false"]))
    assert torch.equal(logits(made), logits(model))
    assert made.head.out.weight is not made.embed.table
    with torch.no_grad():
        made.head.out.weight.zero_()
    assert made.embed.table.abs().sum() > 0


def test_new_tensors_equal_those_of_a_new_model() -> None:
    model = random_model()
    made, found = graft(model, changed(model.part, ["layers.1.mixer.qk_norm=rmsnorm", "layers.*.mixer.bias=true"]), seed=3)
    fresh = stored(build(made.part, seed=3))
    new = [row.b for row in found.tensors if row.status == "new"]
    assert len(new) == 2 + 4 * 3
    assert all(torch.equal(tensor_at(made, path), fresh[path]) for path in new if path)


def test_an_unknown_transformation_is_refused_with_its_path() -> None:
    model = random_model()
    spec = changed(model.part, ["layers.2.ffn.hidden=48"])
    with pytest.raises(SpecError, match=r"layers\.2\.ffn\.\w+\.weight: cannot be carried over: ffn 44 → 48.*--redraw"):
        graft(model, spec)
    made, found = graft(model, spec, redraw=True, seed=4)
    lost = [row.b for row in found.tensors if row.status == "impossible"]
    assert len(lost) == 3
    fresh, before = stored(build(spec, seed=4)), stored(model)
    for path, tensor in stored(made).items():
        assert torch.equal(tensor, fresh[path] if path in lost else before[path])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    model = random_model(dtype=dtype)
    made, _ = graft(model, changed(model.part, ["layers.*.mixer.kv_heads=2", "layers.0.mixer.gate=true", "vocab=70"]))
    assert {weight.dtype for weight in made.parameters()} == {dtype}
    assert torch.isfinite(logits(made)).all()


def test_a_graft_can_be_trained() -> None:
    model = random_model()
    before = {path: tensor.clone() for path, tensor in stored(model).items()}
    made, _ = graft(model, changed(picked(model.part, (0, 0, 1)), ["vocab=70", "head.tied=false"]), picks=(0, 0, 1))
    tokens = torch.arange(20).reshape(2, 10)
    made.loss(tokens, tokens, Ctx(layout=TokenLayout.whole(2, 10))).backward()
    assert all(weight.grad is not None for weight in made.parameters())
    assert all(torch.equal(tensor, before[path]) for path, tensor in stored(model).items())


def test_a_kept_weight_takes_no_extra_memory() -> None:
    model = random_model()
    spec: Model = changed(model.part, [WINDOW])
    made, _ = graft(model, spec)
    assert all(tensor.data_ptr() == tensor_at(model, path).data_ptr() for path, tensor in stored(made).items())
