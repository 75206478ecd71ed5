"""µP: widened specs, learning rates and initial weights by role, and the coordinate check, which the standard parametrization
fails."""

import dataclasses as dc
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.cli import main
from dovetail.spec.field import widening
from dovetail.spec.fold import declared
from dovetail.spec.part import KINDS
from dovetail.training.coordinates import FLAT, slope
from dovetail.training.optim import Optimizer
from dovetail.weights.surgery.resize import _grown, widened

SPEC = """
dovetail: 1
width: 32
vocab: 280
layers:
- repeat: 2
  mixer: {heads: 4, kv_heads: 2}
  ffn: {hidden: 72}
init: {kind: mup, base_width: 32}
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "tale.txt"
    file.write_text("".join(f"The {n * n % 97} birds of {n % 13} fly over {n % 7} hills.\n" for n in range(600)))
    return file


def test_sizes_grow_and_heads_keep_theirs() -> None:
    wide = widened(dt.from_yaml(SPEC), 96)
    assert (wide.width, wide.layers[1].mixer.heads, wide.layers[1].mixer.kv_heads, wide.layers[0].ffn.hidden) == (
        96,
        12,
        6,
        216,
    )
    assert wide.vocab == 280
    assert wide == wide.set("head.scale", 32 / 96)


def _growing() -> list[tuple[str, str]]:
    """Every field of a kind that grows with the width."""
    return [(name, field) for name, kind in sorted(KINDS.items()) for field in widening(kind)]


@pytest.mark.parametrize(("kind", "field"), _growing())
def test_each_size_grows_whichever_of_the_others_are_unset(kind: str, field: str) -> None:
    names = [name for name in widening(KINDS[kind]) if name != field]
    required = {name: 10 for name in names if _default(kind, name) is not None}
    part = KINDS[kind](**{**required, field: 12})
    wide = _grown(part, Fraction(2), "")
    assert {name: getattr(wide, name) for name in (*names, field)} == {
        name: None if getattr(part, name) is None else 2 * getattr(part, name) for name in (*names, field)
    }


def _default(kind: str, name: str) -> object:
    return next(one.default for one in dc.fields(KINDS[kind]) if one.name == name)


def test_experts_and_latents_grow_with_their_parts() -> None:
    spec = dt.load_spec("llama-tiny").set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 40})
    spec = spec.set(
        "layers.*.mixer", {"kind": "mla", "heads": 2, "kv_rank": 24, "q_rank": 12, "nope": 8, "rope": 4, "value": 6}
    )
    wide = widened(spec, 2 * spec.width)
    assert (
        wide.layers[0].mixer
        == spec.set("layers.*.mixer.heads", 4)
        .set("layers.*.mixer.kv_rank", 48)
        .set("layers.*.mixer.q_rank", 24)
        .layers[0]
        .mixer
    )
    assert (wide.layers[0].ffn.hidden, wide.layers[0].ffn.experts) == (80, 4)


def test_a_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.mixer\.kv_heads: 2 times 3/4 is not a whole number"):
        widened(dt.from_yaml(SPEC), 24)


def test_at_its_base_width_it_is_the_standard_parametrization() -> None:
    spec = dt.from_yaml(SPEC)
    assert widened(spec, 32) == spec
    optimizer = Optimizer(dt.build(spec))
    scales = {group["scale"] for part in optimizer.parts for group in part.param_groups}
    assert scales == {1.0, 32 / 72}  # ffn.down has 72 inputs


@pytest.mark.parametrize("tied", [True, False])
def test_roles_scale_as_in_the_paper(tied: bool) -> None:
    base = dt.from_yaml(SPEC).set("head.tied", tied)
    stds = {}
    for width in (32, 128):
        wide = widened(base, width)
        stds[width] = {
            d.path: d.scope.init.std(d.weight, d.scope)
            for d in declared(wide)
            if d.weight.learned and d.weight.init == "normal"
        }
    ratio = {path: stds[128][path] / stds[32][path] for path in stds[32]}
    assert ratio["embed.table"] == 1
    assert ratio["layers.0.mixer.q.weight"] == pytest.approx(4**-0.5)
    assert ratio["layers.1.ffn.down.weight"] == pytest.approx(4**-0.5)
    if not tied:
        assert ratio["head.out.weight"] == pytest.approx(1 / 4)
    logits = [dt.build(widened(base, width))(torch.arange(20)[None]).std().item() for width in (32, 128, 512)]
    assert logits[2] < logits[1] < logits[0]  # initial logits vanish with the width


def test_the_slope_of_a_power() -> None:
    assert slope([8, 16, 32], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert slope([8, 16], [0.0, 0.0]) == 0
    assert slope([8, 16], [0.0, 1.0]) == float("inf")


@pytest.mark.quick(1)
@pytest.mark.parametrize("tied", [True, False])
def test_mup_is_flat_and_the_standard_parametrization_is_not(text: Path, tied: bool) -> None:
    sizes: dict[str, Any] = {"batch": 4, "length": 16}
    found = dt.mup_check(SPEC, text, set=f"head.tied={str(tied).lower()}", **sizes)
    assert found.widths == (32, 64, 128, 256)
    assert found.flat, str(found)
    standard = dt.mup_check(SPEC, text, set=["init=normal", f"head.tied={str(tied).lower()}"], **sizes)
    assert standard.largest_slope > 4 * FLAT, str(standard)


def exit_code(command: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(command)
    return ended.value.code


def test_the_flag_plots_and_tells_by_its_exit_code(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    sizes = ["--widths", "32", "64", "128", "--batch", "4", "--length", "16", "--learning-rate", "0.01"]
    command = ["train", str(spec), "--text", str(text), "--mup-check", "check.png", *sizes]
    assert exit_code(command) == 0
    assert "flat" in capsys.readouterr().out
    assert (tmp_path / "check.png").read_bytes()[:4] == b"\x89PNG"
    assert exit_code([*command, "--force", "--set", "init=normal"]) == 1
    assert "not flat" in capsys.readouterr().out
