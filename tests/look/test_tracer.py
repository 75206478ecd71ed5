from __future__ import annotations

import pytest
import torch
from tiny import IDS, MIXED, MODEL, SPEC

import dovetail as dt
from dovetail.base.errors import InputError, SpecError
from dovetail.decoding.steps import Decoder
from dovetail.look.intervention import from_run, steer
from dovetail.look.record import Trace
from dovetail.look.tracer import Tracer, trace
from dovetail.ops import attend


def test_slices_of_a_pattern_are_rows_of_the_whole_one() -> None:
    whole = trace(MODEL, IDS, "layers.0.mixer.pattern", patch={"layers.0.mixer.pattern": lambda p: p})["layers.0.mixer.pattern"]
    some = trace(MODEL, IDS, "layers.0.mixer.pattern[head=5, query=-1]", "layers.0.mixer.pattern[head=1|4, query=2:5]")
    torch.testing.assert_close(some["layers.0.mixer.pattern[head=5, query=-1]"], whole[:, 5, -1:])
    torch.testing.assert_close(some["layers.0.mixer.pattern[head=1|4, query=2:5]"], whole[:, [1, 4], 2:5])


def test_a_pattern_that_is_read_leaves_the_output_to_the_kernel_that_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    backends = [b._replace(run=lambda *a, b=b: (used.append(b.name), b.run(*a))[1]) for b in attend.BACKENDS]
    plain = trace(MODEL, IDS, "head.logits")["head.logits"]
    monkeypatch.setattr(attend, "BACKENDS", backends)
    seen = trace(MODEL, IDS, "*.pattern[query=-1]", "head.logits")
    assert torch.equal(seen["head.logits"], plain)
    assert "reference" not in used
    assert seen["layers.1.mixer.pattern"].shape == (2, 6, 1, 9)


@torch.no_grad()
def test_generation_computes_the_activations_of_one_pass() -> None:
    for model in (MODEL, MIXED):
        seen = Trace("layers.*.in", "layers.1.mixer.pattern", "head.logits")
        decoder = Decoder(
            model, dt.Pool(model.part, rows=2, capacity=16, dtype=torch.float64), listen=(t := Tracer(model.part, seen))
        )
        decoder.step(IDS[:, :5], [0, 1])
        for i in range(5, 9):
            decoder.step(IDS[:, i : i + 1], [0, 1])
        t.end()
        whole = trace(model, IDS, "layers.*.in", "layers.1.mixer.pattern")
        assert t.step == 5
        for address, want in whole.items():
            torch.testing.assert_close(seen[address], want, rtol=0, atol=1e-9)


def test_generate_fills_a_trace_and_takes_a_patch() -> None:
    model = dt.build(SPEC, seed=1)
    seen = dt.look.Trace("layers.2.after_ffn[pos=-1]", "layers.*.mixer.z[head=3, step=2:]", "head.logits[pos=-1:10]")
    ids = model.generate(IDS[0], 6, trace=seen, stop=())
    assert seen["layers.2.after_ffn"].shape == (1, 1, 28)
    assert seen["layers.0.mixer.z"].shape == (1, 4, 12)
    assert seen["head.logits"].argmax(-1)[0].tolist() == ids[:2]
    assert "layers.2.after_ffn[pos=-1]" in repr(seen)
    assert model.generate(IDS[0], 6, stop=()) == ids
    direction = torch.randn(28, generator=torch.Generator().manual_seed(0))
    steered = model.generate(IDS[0], 6, stop=(), patch={"layers.1.in[pos=9:]": steer(direction, 40.0)})
    assert steered[0] == ids[0]  # the first new token is that of the prompt, which ends at position 8
    assert steered != ids


def test_what_is_never_reached_is_an_error() -> None:
    with pytest.raises(InputError, match=r"layers.0.in\[pos=40\]: the run has no such token"):
        trace(MODEL, IDS, "head.logits", patch={"layers.0.in[pos=40]": 0.0})
    with pytest.raises(SpecError, match="there is no head 6"):
        trace(MODEL, IDS, "layers.0.mixer.z[head=6]")
    with pytest.raises(InputError, match="a compiled graph has no listener"):
        dt.build(SPEC).generate(IDS[0], 8, compiled=True, trace=Trace("head.logits"))


def test_rows_of_different_lengths_count_back_from_their_own_ends() -> None:
    ctx = dt.Ctx(layout=dt.TokenLayout.padded([9, 4], 9))
    last = trace(MODEL, IDS, "layers.2.in[pos=-1]", "layers.2.in", ctx=ctx)
    want = torch.stack([last["layers.2.in"][0, 8], last["layers.2.in"][1, 3]])[:, None]
    assert torch.equal(last["layers.2.in[pos=-1]"], want)


def test_experts_are_named_by_their_number() -> None:
    taken = trace(MODEL, IDS, "layers.1.ffn.router.chosen", "layers.1.ffn.bank.experts", "layers.1.ffn.bank.experts[expert=2]")
    mine = taken["layers.1.ffn.router.chosen"] == 2
    whole = taken["layers.1.ffn.bank.experts"]
    assert mine.any()
    assert not mine.all()
    assert torch.equal(taken["layers.1.ffn.bank.experts[expert=2]"], whole * mine[..., None])


def test_gradients_reach_a_tap() -> None:
    run = trace(MODEL, IDS, "layers.1.mixer.pattern", "layers.1.ffn_norm.scale", "head.logits", grad=True)
    run["head.logits"][:, -1].sum().backward()
    assert run["layers.1.mixer.pattern"].grad is not None
    scale = run["layers.1.ffn_norm.scale"].grad
    assert scale is not None
    assert scale.abs().sum() > 0


def test_a_trace_says_what_it_holds() -> None:
    run = trace(MODEL, IDS, "layers.0.in", "layers.0.mixer.z[head=1]")
    assert repr(run).splitlines()[0].split() == ["address", "shape", "dtype", "mean", "std", "largest"]
    assert run["layers.0.mixer.z"] is run["layers.0.mixer.z[head=1]"]
    with pytest.raises(KeyError, match="was not recorded"):
        run["layers.2.in"]
    assert from_run(run).run is run


def test_a_patch_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(dt.DovetailError, match="patch: int is not a mapping of addresses"):
        Tracer(SPEC, None, 2)  # type: ignore[arg-type]
