"""Defects of the laws themselves, and those that only other seeds of the laws showed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dovetail as dt
from dovetail.base.errors import FileError, UsageError
from dovetail.files.spec import from_yaml
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.cover import Factor, PairCover, all_factors, holds, meeting
from dovetail.proof.laws.quantized import Int8, decoded_model, quantized_model
from dovetail.proof.laws.sample import BLOCK
from dovetail.proof.laws.suite import try_spec
from dovetail.weights.quantization.recipe import tied_to

SHARED = """
width: 28
vocab: 62
layers:
- {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
- {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}, shares: 0}
"""
STREAMING = """
width: 28
vocab: 62
layers:
- repeat: 2
  ffn: {hidden: 44}
  mixer:
    heads: 6
    kv_heads: 2
    head: 12
    prefix: 3
    position: streaming
    mask: [causal, {kind: window, size: 5, keep: 2}]
"""


def outcomes(spec: str, *laws: str) -> dict[str, str]:
    """law -> its state and detail."""
    return {row.law: f"{row.state} {row.detail}".strip() for row in try_spec(spec, laws)}


def test_a11_a_layer_that_shares_weights_rounds_its_inputs_in_the_dense_model_too():
    case = Case(from_yaml(SHARED))
    model = quantized_model(case, {"layers.0.ffn.up": Int8(dynamic=True)})
    assert tied_to(case.spec, "layers.0.ffn.up") == ["layers.2.ffn.up"]
    dense = Case(case.spec, model=decoded_model(case, model))
    case.same(Case(case.spec, model=model).run(), dense.run(), "quantized and dense")


def test_a12_streaming_positions_go_with_a_prefix():
    laws = ("tapped", "chunked", "fast", "declared", "gradient")
    assert outcomes(STREAMING, *laws) == dict.fromkeys(laws, "passed")


CORRECT = {  # specs that a law accused; the part is right
    "all random features at their floor": (
        "every_weight",
        "embed: {kind: tokens, scale: 60}\nlayers: [{wire: {kind: pre_norm, first_norm: false}, "
        "mixer: {kind: linear_attention, heads: 2, feature: random_features}, ffn: {hidden: 44}}]",
    ),
    "a router that only chooses": (
        "every_field",
        "layers: [{mixer: {heads: 2}, ffn: {kind: moe, experts: 6, hidden: 20, "
        "router: {kind: sigmoid_router, top_k: 1, norm: {kind: rmsnorm, scale: false}}}}]",
    ),
    "a first branch that norms itself": (
        "every_field",
        "layers: [{mixer: null, ffn: {kind: ple, piece: 9}}, {mixer: {heads: 2}}]",
    ),
}


@pytest.mark.parametrize("what", CORRECT)
def test_a11_a_correct_model_is_not_accused(what: str):
    law, spec = CORRECT[what]
    assert outcomes(f"width: 28\nvocab: 62\n{spec}", law) == {law: "passed"}


def test_a12_declarations_meet_every_field_of_the_part_above():
    position = f"{BLOCK}/mixer=attention/position=streaming"
    widens, prefix = holds(position, "widens"), Factor(f"{BLOCK}/mixer=attention/prefix", "3", False)
    norm = Factor(f"{BLOCK}/mixer=attention/v_norm", "rmsnorm", True)
    pairs = set(meeting(all_factors()))
    for other in (prefix, norm):
        assert (min(widens, other), max(widens, other)) in pairs


def test_a12_a_spec_with_the_declaration_and_the_field_is_found():
    position = f"{BLOCK}/mixer=attention/position=streaming"
    widens, prefix = holds(position, "widens"), Factor(f"{BLOCK}/mixer=attention/prefix", "3", False)
    cover = PairCover(0)
    cover.keep(from_yaml(STREAMING.replace("prefix: 3", "prefix: 0")))
    assert widens in cover.met
    assert prefix not in cover.met
    spec = cover.best(cover.pins(widens, prefix), {widens, prefix}, tries=40)
    assert spec is not None


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", ["heads: 2, kv_heads: 2", "heads: 2", "heads: 1, kv_heads: 1", "heads: 2, head: 14"])
def test_a22_null_may_mean_the_number_that_a_field_has(fields: str):
    spec = f"{{width: 28, vocab: 62, layers: [{{mixer: {{{fields}}}, ffn: {{hidden: 44}}}}]}}"
    assert outcomes(spec, "every_field") == {"every_field": "passed"}


def test_a22_a_field_that_changes_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    from dovetail.parts.mixer.attention import Attention

    monkeypatch.setattr(Attention, "groups", lambda self: self.heads)
    spec = "{width: 28, vocab: 62, layers: [{mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}"
    assert outcomes(spec, "every_field") == {"every_field": "failed layers.0.mixer.kv_heads: changing it changes nothing"}


# -- the verb


@pytest.mark.slow
def test_a10_only_works_without_a_spec(monkeypatch: pytest.MonkeyPatch):
    from dovetail.proof.laws import suite

    monkeypatch.setattr(suite, "specs_of", lambda *_: iter([(from_yaml(SHARED), "pairs")]))
    rows: list[object] = []
    data = dt.laws(quick=True, only=["causal", "tapped"], watch=rows.append).to_dict()
    assert (sorted(data["by_law"]), data["cells"], data["failed"]) == (["causal", "tapped"], 2, 0)
    assert len(rows) == 1  # each spec is shown when it is known
    with pytest.raises(FileError, match="'cuasal' is not a law"):
        dt.laws(only=["cuasal"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 2}, "seeds: is not used on sampled specs"),
        ({"as_is": True}, "as_is=True: is not used on sampled specs"),
        ({"spec": "llama-tiny", "quick": True}, "quick=True: is not used on a spec"),
        ({"spec": "llama-tiny", "as_is": True}, "as_is=True: is not used on a spec"),
        ({"spec": "llama-tiny", "seeds": -1}, "seeds: is -1; the minimum is 1"),
        ({"spec": "py:x.py:f", "quick": True}, "quick=True: is not used on a model of another library"),
        ({"spec": "http://127.0.0.1:9/v1", "as_is": True}, "as_is=True: is not used on a server"),
    ],
)
def test_a10_an_option_that_is_not_used_is_refused(options: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message.replace("(", "[(]")):
        dt.laws(**options)


def test_a11_a_spec_is_tested_with_several_seeds(monkeypatch: pytest.MonkeyPatch):
    from dovetail.proof import subjects
    from dovetail.proof.laws.law import Outcome

    seen: list[tuple[str, int]] = []

    def outcome(text: str, names: list[str], seed: int) -> list[Outcome]:
        seen.append((names[0], seed))
        return [Outcome(names[0], "failed" if seed == 1 else "passed", f"by {seed}", 1.0)]

    monkeypatch.setattr(subjects, "try_spec", outcome)
    (row, slow) = dt.laws(SHARED, only=["causal", "compiled"]).to_dict()["laws"]
    assert (row["state"], row["detail"], row["seconds"]) == ("failed", "seed 1: by 1", 2.0)
    assert slow["state"] == "passed"
    assert seen == [("causal", 0), ("causal", 1), ("compiled", 0)]
    seen.clear()
    dt.laws(SHARED, only=["causal"], seed=2, seeds=4)
    assert [seed for _, seed in seen] == [2, 3, 4, 5]


def test_a8_time_of_children_is_counted():
    from dovetail.proof.laws.law import cpu_seconds

    work = "import time; begin = time.process_time()\nwhile time.process_time() < begin + 0.4: pass\nprint(flush=True); input()"
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds() - before >= 0.4  # of a child that runs
        child.communicate(b"\n")
    assert cpu_seconds() - before >= 0.4  # and of one that has ended


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), pytest.param(("--json",), marks=pytest.mark.slow)])
def test_c8_results_come_as_they_are_known(flags: tuple[str, ...]):
    command = [sys.executable, "-m", "dovetail", "laws", "llama-tiny", "--only", "round_trip", "compiled", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        lines = run.stderr if flags else run.stdout
        try:
            assert "llama-tiny" in lines.readline()
            assert "round_trip" in lines.readline()  # while the slow law is tested
            assert run.poll() is None
        finally:
            run.kill()


SINGLE = """
width: 28
vocab: 62
layers:
- mixer: {heads: 2, head: 14}
  ffn: {kind: moe, experts: 4, hidden: 20, router: {kind: softmax_router, top_k: 1, norm: layernorm, z_loss: 0.01}}
"""


def test_the_scale_of_a_norm_before_a_router_of_a_single_normalized_expert_is_excepted():
    assert outcomes(SINGLE, "looking")["looking"].startswith("passed 1 of 31 taps excepted")
    other = outcomes(SINGLE.replace("z_loss: 0.01", "normalize: false"), "looking")["looking"]
    assert other.startswith("passed 0 of 3"), other
