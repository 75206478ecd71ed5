"""A foreign engine as a view: it is constructed for the scoring of each layer, keeps its keys to itself, and decodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Edit, Entries, Scoring
from dovetail.proof.laws.case import perturbed

SPEC = """
width: 28
vocab: 62
layers:
- {mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 5}], softcap: 2.0}, ffn: {hidden: 44}}
- {mixer: {heads: 4, kv_heads: 4, head: 10, position: alibi, sink: true, scale: 0.4}, ffn: {hidden: 44}}
- {mixer: {heads: 6, kv_heads: 1, head: 12, qk_norm: rmsnorm, qk_norm_after: true}, ffn: {hidden: 44}}
"""
CTX = Ctx(layout=TokenLayout.whole(1, 1))


class Engine:
    """Keys and values of one row, and attention over them, token by token, by arithmetic of its own."""

    def __init__(self, scoring: Scoring) -> None:
        if scoring.on_read is not None:
            raise StateError("this engine does not rotate keys on read")
        self.reach, self.scale, self.cap, self.sink = scoring.mask.reach(), scoring.scale, scoring.softcap, scoring.sink
        self.slopes = scoring.tables[0] if scoring.bias is not None else None
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def append(self, layout: TokenLayout, k: Tensor, v: Tensor) -> Engine:
        self.k += k[0]
        self.v += v[0]
        return self

    def stored(self) -> Engine:
        return self

    append_blocks = append

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        assert edit is None
        return torch.stack([self.one(query, int(at)) for query, at in zip(q[0], layout.order[0], strict=True)])[None]

    def one(self, q: Tensor, at: int) -> Tensor:
        """q (heads, head) of the token at a position -> (heads, head)."""
        first = 0 if self.reach is None else max(0, at - self.reach + 1)
        shared, rows = q.shape[0] // self.k[0].shape[0], []
        for head, query in enumerate(q):
            scores = torch.stack([self.scale * query @ self.k[i][head // shared] for i in range(first, at + 1)])
            if self.cap is not None:
                scores = self.cap * torch.tanh(scores / self.cap)
            if self.slopes is not None:
                scores = scores - self.slopes[head] * (at - torch.arange(first, at + 1))
            weights = scores.exp()
            total = weights.sum() + (0 if self.sink is None else self.sink[head].exp())
            rows.append(sum(w * self.v[i][head // shared] for w, i in zip(weights, range(first, at + 1), strict=True)) / total)
        return torch.stack(rows)

    def entries(self) -> Entries:
        raise StateError("this engine keeps its keys to itself")


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 1, 1, 6]])
@torch.no_grad()
def test_a_view_that_returns_no_keys_decodes_as_the_whole_pass(chunks: list[int]) -> None:
    model = perturbed(from_yaml(SPEC))
    tokens = torch.randint(0, 62, (1, 13), generator=torch.Generator().manual_seed(3))
    views = [{"mixer": Engine(block.mixer.scoring(CTX))} for block in model.layers]
    found, begin = [], 0
    for n in chunks:
        layout = TokenLayout.whole(1, n, start=begin)
        found.append(model(tokens[:, begin : begin + n], Ctx(layout=layout, views=views)))
        begin += n
    torch.testing.assert_close(torch.cat(found, 1), model(tokens), atol=1e-12, rtol=1e-12)


def test_an_engine_may_refuse_keys_that_are_rotated_on_read() -> None:
    model = perturbed(from_yaml(SPEC).set("layers.0.mixer.position", {"kind": "rope", "when": "read"}))
    mixer = model.layers[0].mixer
    with pytest.raises(StateError, match="does not rotate keys on read"):
        Engine(mixer.scoring(CTX))


def test_a_mixer_that_reads_the_entries_is_refused_by_such_an_engine() -> None:
    model = perturbed(from_yaml("{width: 28, vocab: 62, layers: [{mixer: {kind: multiplicative_attention, heads: 2}}]}"))
    views = [{"mixer": Engine(model.layers[0].mixer.scoring(CTX))}]
    views[0]["mixer"].append = lambda layout, x: views[0]["mixer"]  # type: ignore[method-assign]
    with pytest.raises(StateError, match="keeps its keys to itself"):
        model(torch.zeros(1, 3, dtype=torch.long), Ctx(layout=TokenLayout.whole(1, 3), views=views))
