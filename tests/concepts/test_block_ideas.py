"""The block: norms, wires, feed-forwards, initialization, tying; each concept tested by a number or an identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.files.spec import changed, from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.groups import GROUPS, Wire
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import alone
from dovetail.spec.fold import parameters
from dovetail.spec.part import KINDS


def part(kind: str, **fields: Any) -> Any:
    return KINDS[kind](**fields)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_norms_are_torch_s() -> None:
    x, scale, shift = randn(3, 5, 28) * 3 + 1, randn(28, seed=1), randn(28, seed=2)
    ctx = Ctx(layout=TokenLayout.whole(3, 5))
    for eps in (1e-6, 0.3):
        ours = alone(part("layernorm", eps=eps), {"scale": scale.tolist(), "shift": shift.tolist()}, embed=28)
        torch.testing.assert_close(ours(x, ctx), F.layer_norm(x, (28,), scale, shift, eps))
        ours = alone(part("rmsnorm", eps=eps), {"scale": scale.tolist()}, embed=28)
        torch.testing.assert_close(ours(x, ctx), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale)
        torch.testing.assert_close(ours(x, ctx), F.rms_norm(x, (28,), scale, eps))


def test_a_norm_does_not_depend_on_the_batch() -> None:
    """Statistics lie within a token; those of a batch norm would not."""
    x, ctx = randn(4, 5, 28), Ctx(layout=TokenLayout.whole(4, 5))
    for kind, weights in (("layernorm", {"scale": [1.0] * 28, "shift": [0.0] * 28}), ("rmsnorm", {"scale": [1.0] * 28})):
        norm = alone(part(kind), weights, embed=28)
        assert norm(x, ctx)[2].equal(norm(x[2:3], Ctx(layout=TokenLayout.whole(1, 5)))[0])
    batch = torch.nn.BatchNorm1d(28).double()
    assert (batch(x.flatten(0, 1)).view_as(x)[2] - batch(x[2])).abs().max() > 0.1


# of one residual stream; tests/parts/test_mhc.py has the others
WIRES = sorted(kind for kind, cls in KINDS.items() if issubclass(cls, Wire) and cls().streams() == 1)


@pytest.mark.parametrize("wire", WIRES)
def test_each_placement_is_its_equation(wire: str) -> None:
    spec = from_yaml(
        f"{{width: 24, layers: [{{wire: {wire}, mixer: {{heads: 2}}, ffn: {{hidden: 40}}}}], init: {{spread: 0.3}}}}"
    )
    block: Any = build(spec, dtype=torch.float64).layers[0]
    with torch.no_grad():
        for name, tensor in block.named_parameters():
            if "norm" in name:
                tensor.copy_(1 + 0.5 * randn(*tensor.shape, seed=len(name)))
    x, ctx = randn(2, 7, 24), Ctx(layout=TokenLayout.whole(2, 7))
    norms = {name: lambda y, m=module: m(y, ctx) for name, module in block.named_children() if name.endswith("norm")}
    f, g = (lambda y: block.mixer(y, ctx)), (lambda y: block.ffn(y, ctx))

    def wanted() -> Tensor:
        if wire == "parallel":
            return x + f(norms["norm"](x)) + g(norms["norm"](x))
        y = x
        for name, branch in (("mixer", f), ("ffn", g)):
            first, second = norms[f"{name}_norm"], norms.get(f"{name}_post_norm")
            y = {
                "pre_norm": lambda y=y, n=first, b=branch: y + b(n(y)),
                "post_norm": lambda y=y, n=first, b=branch: n(y + b(y)),
                "sandwich_norm": lambda y=y, n=first, m=second, b=branch: y + m(b(n(y))),  # type: ignore[misc]
                "res_post_norm": lambda y=y, n=first, b=branch: y + n(b(y)),
            }[wire]()
        return y

    torch.testing.assert_close(block(x, ctx, {}), wanted())


@pytest.mark.slow
def test_deep_pre_norm_trains_without_warm_up_where_post_norm_does_not() -> None:
    """16 layers of variance-preserving initialization, full rate from the first step, on texts that repeat: pre learns them,
    post stays near a uniform guess, ln 20 = 3.0."""
    text = torch.randint(0, 20, (8, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 3)
    final: dict[str, float] = {}
    for wire in ("pre_norm", "post_norm"):
        layer = f"{{repeat: 16, norm: layernorm, wire: {wire}, mixer: {{heads: 2}}, ffn: {{kind: mlp, hidden: 64}}}}"
        model = build(from_yaml(f"{{width: 32, vocab: 20, norm: layernorm, layers: [{layer}], init: fan_in}}"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(50):
            loss = model.loss(text[:, :-1], text[:, 1:], Ctx(layout=TokenLayout.whole(8, 35)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            final[wire] = loss.item()
    assert final["pre_norm"] < 1.0
    assert final["post_norm"] > 2.0


def test_feed_forwards_of_every_act() -> None:
    """mlp: act(x W_up) W_down; glu: (act(x W_gate) ∘ x W_up) W_down, for every act there is."""
    x, ctx = randn(2, 3, 8), Ctx(layout=TokenLayout.whole(2, 3))
    up, gate, down = randn(20, 8, seed=1), randn(20, 8, seed=2), randn(8, 20, seed=3)
    acts = {
        "relu": lambda v: v.clamp_min(0),
        "relu2": lambda v: v.clamp_min(0) ** 2,
        "gelu": lambda v: v * 0.5 * (1 + torch.erf(v / 2**0.5)),
        "gelu_tanh": lambda v: v * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))),
        "silu": lambda v: v / (1 + torch.exp(-v)),
        "sigmoid": lambda v: 1 / (1 + torch.exp(-v)),
        "identity": lambda v: v,
    }
    for kind, act in acts.items():
        mlp = alone(
            part("mlp", hidden=20, act=part(kind), bias=False),
            {"up.weight": up.tolist(), "down.weight": down.tolist()},
            embed=8,
        )
        torch.testing.assert_close(mlp(x, ctx), act(x @ up.T) @ down.T)
        weights = {"gate.weight": gate.tolist(), "up.weight": up.tolist(), "down.weight": down.tolist()}
        glu = alone(part("glu", hidden=20, act=part(kind)), weights, embed=8)
        torch.testing.assert_close(glu(x, ctx), (act(x @ gate.T) * (x @ up.T)) @ down.T)


def test_hidden_sizes_are_the_usual_ones() -> None:
    plain = build(from_yaml("{width: 512, layers: [{ffn: mlp}]}"), device="meta").layers[0].ffn
    gated = build(from_yaml("{width: 512, layers: [{ffn: glu}]}"), device="meta").layers[0].ffn
    assert plain.up.weight.shape == (2048, 512)
    assert gated.gate.weight.shape == (1536, 512)  # 1365.3 up to a multiple of 256


def test_a_plain_ffn_of_512_has_2_1_million_weights() -> None:
    bare = from_yaml("{width: 512, layers: [{ffn: {kind: mlp, bias: false}}]}")
    assert parameters(bare) - parameters(bare.set("layers.0.ffn", None)) - 512 == 2_097_152  # 512: the norm before it


# -- the stream


@pytest.mark.parametrize("wire", WIRES)
def test_the_output_of_a_block_has_the_shape_of_its_input(wire: str) -> None:
    model = build(from_yaml(f"{{width: 24, layers: [{{repeat: 2, wire: {wire}, mixer: {{heads: 2}}, ffn: {{hidden: 40}}}}]}}"))
    shapes: list[torch.Size] = []
    ctx = Ctx(
        layout=TokenLayout.whole(3, 7),
        taps=Listener({"layers.*": lambda _, x: shapes.append(x.shape) if x.shape[-1] == 24 else None}),
    )
    model(torch.zeros(3, 7, dtype=torch.long), ctx)
    assert len(shapes) >= 6
    assert set(shapes) == {torch.Size([3, 7, 24])}


def test_a_part_that_changes_the_length_declares_it() -> None:
    model = build(load_spec("vit-tiny"))
    x, ctx = model.hidden(torch.zeros(2, 1, 28, 28), Ctx(layout=TokenLayout.whole(2, 1)))
    assert x.shape == (2, 50, 100)
    assert ctx.layout.n == 50


def test_outputs_stay_level_with_depth_where_the_start_is_scaled_and_grow_where_it_is_not() -> None:
    """The variance of the stream behind L pre-norm layers, over that behind none."""

    def variance(depth: int, residual: str) -> float:
        layer = f"{{repeat: {depth}, mixer: {{heads: 4}}, ffn: {{kind: mlp, bias: false}}}}"
        spec = from_yaml(
            f"{{width: 64, vocab: 50, norm: null, layers: [{layer}], init: {{spread: 0.125, residual: {residual}}}}}"
        )
        model, seen = build(spec), []
        tokens = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            listen = Listener({"embedded": lambda _, x: seen.append(x)})
            end, _ = model.hidden(tokens, Ctx(layout=TokenLayout.whole(4, 16), taps=listen))
        return (end.var() / seen[0].var()).item()

    level = [variance(depth, "true") for depth in (4, 16, 64)]
    growing = [variance(depth, "false") for depth in (4, 16, 64)]
    assert max(level) / min(level) < 1.5
    assert 2.5 < growing[1] / growing[0] < 6  # four times as deep
    assert 2.5 < growing[2] / growing[1] < 6


def test_initial_weights_follow_role_and_depth() -> None:
    for kind, q, o in (("normal", 0.02, 0.02 / 8**0.5), ("fan_in", 64**-0.5, 64**-0.5), ("mup", 0.04, 0.04)):
        model = build(from_yaml(f"{{width: 64, layers: [{{repeat: 4, mixer: {{heads: 2}}}}], init: {kind}}}"))
        mixer = model.layers[0].mixer
        assert mixer.q.weight.std().item() == pytest.approx(q, rel=0.1)
        assert mixer.o.weight.std().item() == pytest.approx(o, rel=0.1)


# -- the ends of a model


def test_tying_saves_exactly_one_table() -> None:
    tied = from_yaml("{width: 28, vocab: 62, layers: [{mixer: {heads: 2}}]}")
    assert parameters(changed(tied, ["head.tied=false"])) - parameters(tied) == 62 * 28
    model = build(tied)
    assert sum(p.numel() for p in model.parameters()) == parameters(tied)
    assert model.head.out.weight is model.embed.table


def test_soft_cap_and_scales_of_the_two_ends() -> None:
    spec = from_yaml("{width: 28, vocab: 62, layers: [{mixer: {heads: 2}}], init: {spread: 1.0}}")
    tokens, ctx = torch.arange(9)[None], Ctx(layout=TokenLayout.whole(1, 9))
    raw = build(spec)(tokens, ctx)
    assert raw.abs().max() > 6
    torch.testing.assert_close(build(changed(spec, ["head.softcap=3.0"]))(tokens, ctx), 3 * torch.tanh(raw / 3))
    torch.testing.assert_close(build(changed(spec, ["head.scale=0.25"]))(tokens, ctx), raw / 4)
    plain, scaled = (build(changed(spec, [f"embed.scale_by_width={on}"])).embed(tokens, ctx)[0] for on in ("false", "true"))
    torch.testing.assert_close(scaled, plain * 28**0.5)


def test_both_recipes_are_one_line() -> None:
    """The modern one is the defaults; the one of 2017 is a name."""
    modern = from_yaml("layers: [{repeat: 6}]")
    block = modern.layers[0]
    assert [block.wire.kind, block.norm.kind, block.ffn.kind, block.ffn.act.kind] == ["pre_norm", "rmsnorm", "glu", "silu"]  # type: ignore[union-attr, attr-defined]
    assert [block.mixer.position.kind, block.mixer.bias, modern.head.tied] == ["rope", False, True]  # type: ignore[union-attr, attr-defined]
    first = load_spec("transformer-2017-base")
    assert (first.width, len(first.layers), len(first.encoder.layers)) == (512, 6, 6)  # type: ignore[union-attr]
    assert [first.layers[0].wire.kind, first.position.kind] == ["post_norm", "sinusoidal"]


def test_every_group_can_be_swapped_by_name() -> None:
    """An idea counts as present when a user can choose it by name."""
    assert {group.group for group in GROUPS} >= {
        "mixer",
        "position",
        "mask",
        "norm",
        "wire",
        "ffn",
        "act",
        "embed",
        "head",
        "init",
    }
    spec = changed(
        from_yaml("layers: [{repeat: 2}]"),
        swaps=["position=alibi", "norm=layernorm", "wire=sandwich_norm", "ffn=mlp", "act=relu"],
    )
    block: Any = spec.layers[1]
    assert [block.mixer.position.kind, block.norm.kind, block.wire.kind, block.ffn.kind, block.ffn.act.kind] == [
        "alibi",
        "layernorm",
        "sandwich_norm",
        "mlp",
        "relu",
    ]
