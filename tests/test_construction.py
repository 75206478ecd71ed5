"""Initial weights are a function of (seed, path, index): a swapped part leaves every other weight bit-equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.files.spec import from_yaml
from dovetail.model import construction
from dovetail.model.construction import build, generator, initial, initial_slice, on_meta
from dovetail.model.model import Model, ModelModule
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import declared
from dovetail.spec.part import KINDS

SPEC = from_yaml("width: 28\nvocab: 62\nlayers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]\n")
ATTENTION = {f"layers.{i}.mixer.{name}.weight" for i in range(3) for name in "kv"}


def weights(model: ModelModule) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        (SPEC.swap("position", KINDS["alibi"]()), set()),
        (SPEC.swap("position", KINDS["t5_bias"]()), set()),
        (SPEC.swap("position", KINDS["learned"](length=64)), set()),
        (SPEC.swap("norm", KINDS["layernorm"]()), set()),
        (SPEC.swap("wire", KINDS["sandwich_norm"]()), set()),
        (SPEC.set("layers.*.mixer.sink", True), set()),
        (SPEC.set("layers.*.mixer.kv_heads", 1), ATTENTION),
        (SPEC.set("layers.1.ffn.hidden", 36), {f"layers.1.ffn.{name}.weight" for name in ("gate", "up", "down")}),
        (SPEC.set("vocab", 70), {"embed.table"}),
    ],
)
def test_a_swap_leaves_all_other_initial_weights(spec: Model, others: set[str]) -> None:
    before, after = weights(build(SPEC, seed=3)), weights(build(spec, seed=3))
    shared = before.keys() & after.keys()
    assert len(shared) >= 3 * 7 + 2  # all but the norms a wire adds
    changed = {name for name in shared if not torch.equal(before[name], after[name])}
    assert changed == others


def test_another_seed_is_another_model_and_the_same_seed_the_same() -> None:
    first, again, other = (weights(build(SPEC, seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = {d.path for d in declared(SPEC) if d.weight.learned and d.weight.init == "normal"}
    assert {name for name in first if not torch.equal(first[name], other[name])} == drawn


def test_no_two_weights_share_a_draw() -> None:
    drawn = [p.flatten()[:20] for name, p in weights(build(SPEC)).items() if "norm" not in name]
    signs = torch.stack([p.sign() for p in drawn])
    assert len(torch.unique(signs, dim=0)) == len(drawn)


def test_the_draw_does_not_depend_on_the_dtype_or_on_global_state() -> None:
    torch.manual_seed(5)
    plain = weights(build(SPEC))
    torch.manual_seed(6)
    precise, half = weights(build(SPEC, dtype=torch.float64)), weights(build(SPEC, dtype=torch.bfloat16))
    for name, p in plain.items():
        assert torch.equal(precise[name].float(), p)
        assert torch.equal(half[name], p.bfloat16())


MOE = from_yaml(
    "width: 28\nvocab: 62\nlayers: [{repeat: 2, mixer: {heads: 2, bias: true}, ffn: {kind: moe, experts: 6, hidden: 21}}]\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 5, 64])
@pytest.mark.parametrize("spec", [SPEC, MOE])
def test_a_slice_is_that_of_the_whole(spec: Model, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(spec, seed=3)
    if chunk is not None:  # however the work is divided, too
        monkeypatch.setattr(construction, "CHUNK", chunk)
    for d in declared(spec):
        if not d.weight.learned:
            continue
        value = tensor_at(model, d.path)
        assert torch.equal(initial(d, 3), value), d.path
        for begin, share in ((0, 2), (1, 3), (5, 1)):
            slices = [slice(begin % size, begin % size + max(1, size // share)) for size in value.shape]
            for depth in range(1, len(slices) + 1):
                assert torch.equal(initial_slice(d, 3, slices[:depth]), value[tuple(slices[:depth])]), d.path


def test_a_large_slice_needs_no_whole() -> None:
    """The whole table is 4 EB."""
    table = next(declared(from_yaml(f"width: {2**28}\nvocab: {2**32}\nlayers: [{{}}]\n")))
    corner = initial_slice(table, 0, (slice(2**32 - 3, None), slice(2**28 - 7, None)))
    again = initial_slice(table, 0, (slice(2**32 - 1, None), slice(2**28 - 6, 2**28 - 2)))
    assert corner.shape == (3, 7)
    assert torch.equal(corner[2:, 1:5], again)


def test_a_stream_belongs_to_seed_and_path() -> None:
    def draw(seed: int, path: str) -> list[float]:
        return torch.randn(4, generator=generator(seed, path)).tolist()

    assert draw(0, "a") == draw(0, "a")
    assert len({tuple(draw(seed, path)) for seed, path in ((0, "a"), (0, "b"), (1, "a"), (1, "0:a"), (10, "a"))}) == 5


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = build(SPEC), build(SPEC.set("head.tied", False))
    tables = [p for p in tied.parameters() if p.shape == (62, 28)]
    assert len(tables) == 1
    assert tied.get_parameter("head.out.weight") is tied.get_parameter("embed.table") is tables[0]
    assert len([p for p in untied.parameters() if p.shape == (62, 28)]) == 2


def test_meta_makes_no_bytes_and_the_same_structure() -> None:
    made: Any = on_meta(SPEC)
    real = build(SPEC)
    assert all(p.is_meta for p in made.parameters())
    assert {name: p.shape for name, p in made.named_parameters()} == {name: p.shape for name, p in real.named_parameters()}


def test_weights_are_contiguous():
    """FSDP refuses others. Numbers are drawn in pairs, so that a row of three is cut from four."""
    spec = from_yaml(
        "{width: 28, vocab: 62, layers: [{mixer: {kind: gated_deltanet, heads: 4, conv_size: 3}, ffn: {hidden: 45}}]}"
    )
    assert all(weight.is_contiguous() for weight in build(spec).parameters())
