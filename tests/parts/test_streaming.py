"""Streaming: the visible keys of each query have positions 0 … size − 1, a ring streams without end, and misuse raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import check
from dovetail.state.pool import Pool

SIZE, KEEP = 5, 2
TEXT = """
width: 28
vocab: 62
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 5, keep: 2}], position: streaming}
  ffn: {hidden: 44}
"""


def spec(**mixer: Any) -> Model:
    made = from_yaml(TEXT)
    for name, value in mixer.items():
        made = made.set(f"layers.*.mixer.{name}", value)
    return made


def tokens(n: int, rows: int = 1) -> Tensor:
    return torch.randint(0, 62, (rows, n), generator=torch.Generator().manual_seed(4))


def turned(x: Tensor, ranks: Tensor) -> Tensor:
    """x (m, heads, 12) by rotary angles, pairs half a head apart."""
    angle = ranks[:, None, None] * 10000.0 ** -(torch.arange(6, dtype=torch.float64) / 6)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@pytest.mark.parametrize("when", ["read", "write"])
def test_every_query_sees_its_keys_at_their_positions_in_the_cache(when: str) -> None:
    model = perturbed(spec(position={"kind": "streaming", "of": {"kind": "rope", "when": when}}))
    attention, n = model.layers[0].mixer, 23
    x = torch.randn(1, n, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = attention(x, Ctx(layout=TokenLayout.whole(1, n)))[0]
    q, k, v = (t[0] for t in attention.project(x, Ctx(layout=TokenLayout.whole(1, n))))
    for t in range(n):
        seen = sorted({*range(min(KEEP, t + 1)), *range(max(0, t - SIZE + 1), t + 1)})
        ranks = torch.arange(len(seen))
        keys, values = turned(k[seen], ranks).repeat_interleave(3, 1), v[seen].repeat_interleave(3, 1)
        query = turned(q[t : t + 1], ranks[-1:])[0]
        weights = torch.softmax(torch.einsum("hd,mhd->hm", query, keys) * 12**-0.5, -1)
        want = attention.o(torch.einsum("hm,mhd->hd", weights, values).flatten())
        torch.testing.assert_close(got[t], want, rtol=1e-10, atol=1e-10)


def test_within_the_window_it_is_the_plain_position() -> None:
    model, plain = (perturbed(spec(position=position)) for position in ("streaming", "rope"))
    n = KEEP + SIZE
    got, same = (m(tokens(n + 1), Ctx(layout=TokenLayout.whole(1, n + 1))) for m in (model, plain))
    torch.testing.assert_close(got[:, :n], same[:, :n])
    assert (got[:, n] - same[:, n]).abs().max() > 1e-3


def stream(model: ModelModule, pool: Pool, ids: Tensor) -> Tensor:
    """The answers (n, vocab) to ids (n,), token by token."""
    found = []
    with torch.no_grad():
        for token in ids:
            step = pool.step([0], [1])
            found.append(model(token.view(1, 1), Ctx(layout=step.layout, views=step.views))[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize(("position", "goes_on"), [("streaming", True), ("rope", False)])
def test_a_stream_does_not_depend_on_its_length(position: str, goes_on: bool) -> None:
    """After a thousand million tokens, in float32: the ring and the answers are those of the beginning."""
    model = build(spec(position=position))
    answers = []
    for jump in (0, 1_000_000_000):
        pool = Pool(model.part, 1, 1, layout="ring", slack=3)
        stream(model, pool, tokens(20)[0])
        pool.lengths[0] += jump // (SIZE + 3) * (SIZE + 3)  # whole turns of the ring
        answers.append(stream(model, pool, tokens(40)[0]))
    apart = (answers[0] - answers[1]).abs().max().item() / answers[0].abs().max().item()
    assert (apart < 1e-4) == goes_on


def test_memory_is_constant_in_the_length_of_the_stream() -> None:
    model = build(spec())
    pool = Pool(model.part, 1, 1, layout="ring", slack=3)
    assert pool.bytes() == 2 * 2 * (KEEP + SIZE + 3) * 2 * 12 * 4  # layers, k and v, slots, heads, channels, bytes
    before = pool.bytes()
    assert stream(model, pool, tokens(300)[0]).isfinite().all()
    assert pool.bytes() == before
    assert pool.lengths == [300]


@pytest.mark.parametrize(
    ("mixer", "path", "says"),
    [
        ({"mask": "causal"}, "layers.0.mixer.position", "needs a KV cache of fixed size"),
        ({"mask": {"kind": "window", "size": 5, "keep": 2}}, "layers.0.mixer.position", "needs a KV cache of fixed size"),
        ({"position": {"kind": "streaming", "of": "none"}}, "layers.0.mixer.position.of", "none does not act in attention"),
        ({"position": {"kind": "streaming", "of": "sinusoidal"}}, "layers.0.mixer.position.of", "does not act in attention"),
        ({"position": {"kind": "streaming", "of": "streaming"}}, "layers.0.mixer.position.of", "is itself streaming"),
    ],
)
def test_misuse_raises(mixer: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as told:
        check(spec(**mixer))
    assert str(told.value).startswith(path)


def test_a_norm_after_the_rotation_is_refused_where_keys_have_twice_the_channels() -> None:
    normed = {"qk_norm": "rmsnorm", "qk_norm_after": True}
    with pytest.raises(SpecError, match="qk_norm_after: streaming gives q and k more channels than the norm has"):
        check(spec(**normed))
    check(spec(**normed, mask=["causal", {"kind": "window", "size": SIZE}]))  # no first tokens are kept
