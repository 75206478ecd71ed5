"""A paged KV cache is attended to in pieces of a few rows: equal to the gathered one, and without a copy of all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx
from dovetail.proof.laws.case import perturbed
from dovetail.state import pages
from dovetail.state.pool import Pool

SPEC = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}")


class Largest(TorchDispatchMode):
    """The largest number of values of a tensor made inside."""

    values = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in known:  # neither a view nor written in place
            self.values = max(self.values, out.numel())
        return out


@torch.no_grad()
def decoded(layout: str, lengths: list[int], watch: Largest | None = None) -> Tensor:
    model, rows = perturbed(SPEC), list(range(len(lengths)))
    pool = Pool(SPEC, len(lengths), 96, layout=layout, dtype=torch.float64, page=8)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 62, (len(lengths), 80), generator=draw)
    step = pool.step(rows, lengths)
    model(tokens[:, : max(lengths)], Ctx(layout=step.layout, views=step.views))
    out = []
    for t in range(3):
        step = pool.step(rows, [1] * len(rows))
        if watch is None or t == 0:
            out.append(model(tokens[:, 70 + t : 71 + t], Ctx(layout=step.layout, views=step.views)))
        else:
            with watch:
                out.append(model(tokens[:, 70 + t : 71 + t], Ctx(layout=step.layout, views=step.views)))
    return torch.cat(out, 1)


@pytest.mark.parametrize("tokens", [1, 64, 100, 4096])
@pytest.mark.parametrize("lengths", [[61] * 5, [61, 3, 40, 17, 8]], ids=["even", "ragged"])
def test_pieces_of_any_size_are_the_contiguous_cache(lengths: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TOKENS", tokens)
    torch.testing.assert_close(decoded("paged", lengths), decoded("contiguous", lengths), atol=1e-12, rtol=1e-12)


def test_no_layer_copies_the_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TOKENS", 64)
    watch = Largest()
    decoded("paged", [61] * 5, watch)
    assert watch.values <= (64 + 8) * 2 * 12  # one row: 64 tokens of 2 KV heads, and one page of 8
