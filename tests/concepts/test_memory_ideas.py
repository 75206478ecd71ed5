"""Decode state: KV caches, prefill and decode, pages, windows, tiled attention; each concept tested by a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops.attend import attend, using
from dovetail.spec.check import advice
from dovetail.spec.fold import state_values
from dovetail.spec.part import KINDS, from_data
from dovetail.spec.scope import Scope
from dovetail.state.pool import Pool
from dovetail.state.slots import Paged

TINY = from_yaml(
    """
width: 28
vocab: 62
layers:
  - repeat: 3
    pattern: [local, full]
    local: {mixer: {kind: attention, heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 5, keep: 1}]}}
    full: {mixer: {kind: attention, heads: 6, kv_heads: 2, head: 12}}
    ffn: {hidden: 44}
init: {spread: 0.3}
"""
)
TOKENS = torch.randint(0, 62, (2, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    return build(TINY, dtype=torch.float64)


@pytest.fixture(scope="module")
def whole(model: Any) -> Tensor:
    return model(TOKENS, Ctx(layout=TokenLayout.whole(2, 23)))


@pytest.mark.parametrize("layout", ["contiguous", "paged", "ring"])
def test_cached_decoding_equals_the_whole_forward_at_every_step(model: Any, whole: Tensor, layout: Any) -> None:
    pool = Pool(TINY, rows=2, capacity=23, layout=layout, page=4, dtype=torch.float64)
    for i in range(23):
        step = pool.step([0, 1], [1, 1])
        logits = model(TOKENS[:, i : i + 1], Ctx(layout=step.layout, views=step.views))
        torch.testing.assert_close(logits[:, 0], whole[:, i], rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["contiguous", "paged", "ring"])
@pytest.mark.parametrize("chunks", [[23], [7, 16], [1, 2, 3, 17], [22, 1], [5, 5, 5, 5, 3]])
def test_prefill_in_any_chunks_equals_one(model: Any, whole: Tensor, layout: Any, chunks: list[int]) -> None:
    pool = Pool(TINY, rows=2, capacity=23, layout=layout, page=4, dtype=torch.float64)
    begin = 0
    for size in chunks:
        step = pool.step([0, 1], [size, size])
        logits = model(TOKENS[:, begin : begin + size], Ctx(layout=step.layout, views=step.views))
        torch.testing.assert_close(logits, whole[:, begin : begin + size], rtol=0, atol=1e-9)
        begin += size


@pytest.mark.parametrize(("n", "gigabytes"), [(4096, 1.34), (100_000, 32.8), (131_072, 42.9)])
def test_cache_bytes_are_the_arithmetic(n: int, gigabytes: float) -> None:
    """2·L·g·n·d_k·2 bytes: 80 layers, 8 key heads, 128, half precision."""
    spec = from_yaml("{width: 8192, layers: [{repeat: 80, mixer: {heads: 64, kv_heads: 8, head: 128}}]}")
    exact = 2 * 80 * 8 * 128 * n * 2
    assert 2 * state_values(spec, n) == exact
    assert exact / 1e9 == pytest.approx(gigabytes, abs=0.05 if n > 4096 else 0.005)


def test_a_pool_allocates_what_is_declared() -> None:
    spec = from_yaml("{width: 28, layers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}}]}")
    pool = Pool(spec, rows=4, capacity=50, dtype=torch.float16)
    assert pool.bytes() == 4 * 2 * state_values(spec, 50)
    near = from_yaml(
        "{width: 28, layers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 8}]}}]}"
    )
    ring = Pool(near, rows=4, capacity=50, dtype=torch.float16, layout="ring", slack=0)
    assert ring.bytes() == 4 * 2 * state_values(near, 50) == 4 * 2 * state_values(near, 10_000)


def test_pages_waste_less_than_four_hundredths() -> None:
    """Sequences of 100 to 2,000 tokens in pages of 16: what is taken and not used, over what is taken."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 2001, (64,), generator=draw).tolist()
    slots = Paged(rows=64, capacity=2048, page=16)
    for row, n in enumerate(lengths):
        slots.reserve([row], [0], [n])
    taken = 16 * sum(map(len, slots.owned))
    assert 0 <= (taken - sum(lengths)) / taken < 0.04
    assert (64 * 2048 - sum(lengths)) / (64 * 2048) > 0.3  # a slice of the greatest length for each wastes far more


def test_a_shared_prefix_is_stored_once(model: Any, whole: Tensor) -> None:
    """A fork takes no page; each of its rows then takes its own, and continues as if alone."""
    pool = Pool(TINY, rows=2, capacity=24, layout="paged", page=4, dtype=torch.float64)
    step = pool.step([0], [18])
    model(TOKENS[:1, :18], Ctx(layout=step.layout, views=step.views))
    (slots,) = [group.slots for group in pool.groups.values()]
    assert isinstance(slots, Paged)
    free = len(slots.free)
    pool.fork(0, 1)
    assert len(slots.free) == free
    step = pool.step([0, 1], [1, 1])
    logits = model(torch.stack([TOKENS[0, 18:19], TOKENS[1, 18:19]]), Ctx(layout=step.layout, views=step.views))
    assert free - len(slots.free) == 1  # of the last, half-filled page there are now two
    torch.testing.assert_close(logits[0, 0], whole[0, 18], rtol=0, atol=1e-9)
    forked = model(torch.cat([TOKENS[0, :18], TOKENS[1, 18:19]])[None], Ctx(layout=TokenLayout.whole(1, 19)))
    torch.testing.assert_close(logits[1, 0], forked[0, 18], rtol=0, atol=1e-9)


# -- windows, and attention in tiles


@pytest.mark.parametrize(("layers", "size"), [(1, 4), (2, 4), (3, 3), (4, 2)])
def test_windows_reach_l_times_w_minus_one_plus_one_tokens(layers: int, size: int) -> None:
    """Measured by the gradient of the last token's output."""
    mixer = f"{{heads: 2, mask: [causal, {{kind: window, size: {size}}}]}}"
    spec = from_yaml(f"{{width: 24, vocab: 9, layers: [{{repeat: {layers}, mixer: {mixer}}}], init: {{spread: 0.3}}}}")
    model = build(spec, dtype=torch.float64)
    embedded: list[Tensor] = []
    table = model.embed.register_forward_hook(lambda module, inputs, out: embedded.append(out[0].retain_grad() or out[0]))
    model(torch.arange(30)[None] % 9, Ctx(layout=TokenLayout.whole(1, 30)))[0, -1].sum().backward()
    table.remove()
    grad = embedded[0].grad
    assert grad is not None
    reached = grad[0].abs().amax(-1).nonzero().flatten()
    assert 30 - reached.min().item() == len(reached) == layers * (size - 1) + 1


def test_32_layers_of_4096_reach_131041_tokens() -> None:
    spec = from_yaml(
        "{width: 4096, layers: [{repeat: 32, mixer: {heads: 32, mask: [causal, {kind: window, size: 4096, keep: 4}]}}]}"
    )
    said = [problem.problem for _, problem in advice(spec, 131_042)]
    assert said == ["windows reach 131041 tokens back in all, fewer than the 131042 asked for"]
    assert advice(spec, 131_041) == []


def test_the_cost_of_a_window_grows_as_n_times_w() -> None:
    mixer = KINDS["attention"](mask=from_data(["causal", {"kind": "window", "size": 64}], Mask))  # type: ignore[call-arg]
    scope = mixer.axes(Scope(sizes={"embed": 256}))
    costs = [mixer.cost(scope, n)[1] for n in (1024, 2048, 4096)]
    assert costs[1] / costs[0] == pytest.approx(2, rel=0.04)
    assert costs[2] / costs[1] == pytest.approx(2, rel=0.04)
    assert costs[0] == 4 * 256 * (1024 * 64 - 64 * 63 // 2)  # n·w but for the first tokens, which see fewer


def test_a_stack_may_mix_windows_and_full_layers(model: Any) -> None:
    reaches = [state.window for block in TINY.layers for state in block.mixer.state(Scope())]
    assert reaches == [5, None, 5]
    x = TOKENS.clone()
    x[:, 1] = (x[:, 1] + 1) % 62
    apart = model(x, Ctx(layout=TokenLayout.whole(2, 23))) - model(TOKENS, Ctx(layout=TokenLayout.whole(2, 23)))
    assert (apart[:, -1].abs().max(-1).values > 1e-9).all()  # through the full layer, far beyond any window


class Largest(TorchDispatchMode):
    """The number of values in the largest tensor made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.values = max(self.values, tensor.numel())
        return out


def _attended(backend: str, n: int, track: bool = False) -> tuple[list[Tensor], int]:
    draw = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, n, h, 8, generator=draw, dtype=torch.float64).requires_grad_() for h in (2, 1, 1))
    scoring = Scoring(mask=KINDS["causal"](), scale=0.35, heads=torch.arange(2))
    layout, watch = TokenLayout.whole(1, n), Largest()
    with using(backend):
        if track:
            with watch:
                z = attend(q, k, v, scoring, layout, layout)
                z.sum().backward()
        else:
            z = attend(q, k, v, scoring, layout, layout)
            (z * torch.sin(z)).sum().backward()
    return [z.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)], watch.values


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_tiled_attention_is_exact_forward_and_backward(n: int) -> None:
    for tiled, plain in zip(_attended("tiled", n)[0], _attended("reference", n)[0], strict=True):
        torch.testing.assert_close(tiled, plain, rtol=0, atol=1e-12)


def test_tiled_attention_takes_memory_linear_in_n() -> None:
    tiled = [_attended("tiled", n, track=True)[1] for n in (1024, 2048, 4096)]
    plain = [_attended("reference", n, track=True)[1] for n in (512, 1024, 2048)]
    assert tiled[2] / tiled[1] <= 2.01
    assert tiled[1] / tiled[0] <= 2.01
    assert plain[2] / plain[1] == pytest.approx(4, rel=0.01)
    assert tiled[2] < 4096 * 4096 / 16
