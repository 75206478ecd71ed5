"""Bugs that a short forward pass does not show (cached decoding, long prompts, train mode), and alarms on clean pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LLAMA, Seeded, llama, written
from torch import Tensor, nn

from dovetail.files.spec import from_yaml
from dovetail.proof.compare.check import Verdict, verify
from dovetail.proof.compare.prompt import NAMED, limits_of, long_length, random_prompt
from dovetail.proof.compare.sides import ModuleSide, NativeSide
from dovetail.proof.compare.transformers_side import TransformersSide
from dovetail.views.verdict import body, sentences


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return llama(tmp_path_factory.mktemp("llama"))


def with_rope(model: Any, layer: int, edit: Any) -> None:
    """Edit the rotary tables of one layer."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "position_embeddings": tuple(map(edit, kwargs["position_embeddings"]))}

    model.model.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)


def wrong_only_in_decoding(model: Any) -> None:
    with_rope(model, 1, lambda table: table * 1.01 if table.shape[1] == 1 else table)


def wrong_beyond_64(model: Any) -> None:
    with_rope(model, 1, lambda table: torch.cat([table[:, :64], table[:, 63:-1]], 1) if table.shape[1] > 64 else table)


def checked(places: tuple[Path, Path], plant: Any) -> Verdict:
    a, b = NativeSide(places[0]), Seeded(places[1], plant)
    assert a.spec is not None
    return verify(a, b, random_prompt(a.spec))


def test_a_bug_of_cached_decoding_alone_is_found_in_its_layer(places: tuple[Path, Path]) -> None:
    verdict = checked(places, wrong_only_in_decoding)
    assert (verdict.status, verdict.deciding.name, verdict.layer) == ("structural", "decode B", "layers.1")
    assert verdict.passes[0].comparison.status == verdict.passes[1].comparison.status == "equal"
    assert "decoding with a cache is another function than the full forward pass" in sentences(verdict)[0].plain


@pytest.mark.slow
def test_a_rope_that_is_wrong_beyond_64_tokens_is_found_in_its_layer(places: tuple[Path, Path]) -> None:
    verdict = checked(places, wrong_beyond_64)
    assert (verdict.status, verdict.deciding.name, verdict.layer) == ("structural", "long prompt", "layers.1")
    assert all(one.comparison.status == "equal" for one in verdict.passes[:-1])


@pytest.mark.slow
def test_a_clean_pair_is_decoded_and_long_on_both_sides(places: tuple[Path, Path]) -> None:
    verdict = checked(places, lambda model: None)
    assert verdict.status == "equal"
    assert [one.name for one in verdict.passes] == ["forward", "decode A", "decode B", "decode A and B", "long prompt"]
    tested, not_tested = verdict.coverage()
    assert tested.startswith(
        "float64 and float32; 2 × 37 tokens at 44 taps; decoding of A and B with a cache (21 + 16 × 1 tokens);"
    )
    assert "padding" in not_tested
    html, data = body(verdict), json.dumps(verdict.data())
    assert all(text in html and text in data for text in ("decoding of A and B", "padding"))


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(62, 62), nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.table(ids))


def seeded_module(training: bool) -> nn.Module:
    torch.manual_seed(0)
    return WithDropout().train(training)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_left_on_is_reported(training: bool, places: tuple[Path, Path]) -> None:
    spec = NativeSide(places[0]).spec
    assert spec is not None
    a, b = ModuleSide("a", lambda: seeded_module(training)), ModuleSide("b", lambda: seeded_module(False))
    verdict = verify(a, b, random_prompt(spec))
    assert verdict.status == "equal"
    assert (
        any("A was handed over in train mode, where dropout changes its output" in note for note in verdict.notes) == training
    )
    assert any("decoding of A (it takes no cache)" in text for text in verdict.not_tested)


CACHED = """
import torch
from torch import nn

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(62, 62)

    def forward(self, ids, past=None):
        x = self.table(ids)
        before = 0 if past is None else past{wrong}
        total = before + x.cumsum(1)
        return total, total[:, -1:]

def load():
    return Sum()
"""


@pytest.mark.parametrize(("wrong", "status"), [("", "equal"), (" * 1.01", "structural")])
def test_a_module_that_returns_its_cache_in_a_tuple_is_decoded(tmp_path: Path, wrong: str, status: str) -> None:
    from dovetail.proof.compare.opening import local

    (tmp_path / "sum.py").write_text(CACHED.format(wrong=wrong))
    side = local(f"py:{tmp_path / 'sum.py'}:load")
    verdict = verify(side, side, random_prompt(from_yaml(LLAMA)))
    assert verdict.status == status
    assert [one.name for one in verdict.passes][:2] == ["forward", "decode A"]


def one_row_of_the_head(model: Any) -> None:
    weight = model.lm_head.weight.clone()
    weight[7] *= 1.5
    model.lm_head.weight = nn.Parameter(weight)


@pytest.mark.parametrize("tied", [True, False])
def test_one_changed_row_of_a_head_is_no_untied_head(tmp_path: Path, tied: bool) -> None:
    places = written(tmp_path, from_yaml(LLAMA).set("head.tied", tied))
    verdict = checked(places, one_row_of_the_head)
    assert (verdict.status, verdict.layer) == ("structural", "head")
    assert verdict.cause is not None
    assert verdict.cause.name == "other numbers in the weights"
    assert "1 of 62 rows" in verdict.cause.description


def rounds_in_float32_alone(model: Any) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out.bfloat16().float() if out.dtype == torch.float32 else out

    model.model.layers[1].mlp.register_forward_hook(hook)


@pytest.mark.slow
def test_a_side_that_rounds_more_than_the_other_is_rounding(places: tuple[Path, Path]) -> None:
    verdict = checked(places, rounds_in_float32_alone)
    assert (verdict.status, verdict.layer, verdict.failed) == ("rounding", "layers.1", False)


MIXTRAL = LLAMA.replace("ffn: {hidden: 44}", "ffn: {kind: moe, experts: 6, hidden: 20}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flips_of_near_tied_routers_are_excused_and_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    ours, theirs = written(tmp_path, from_yaml(MIXTRAL), seed=2)
    a, b = NativeSide(ours), TransformersSide(theirs)
    assert a.spec is not None
    verdict = verify(a, b, random_prompt(a.spec, rows=8), dtype=dtype, longest=0, decode=False)
    assert verdict.status == "equal"
    assert min(verdict.comparison.flips) > 0
    assert any("on near-ties" in note for note in verdict.notes)
    assert max(tap.excused for tap in verdict.comparison.taps) > 0
    assert all(tap.excused == 0 for tap in verdict.comparison.taps if tap.address.startswith("layers.0.mixer"))


def massive_channel(place: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = next(place.glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "down" in name:
            tensor[5] *= 300
        elif "norm" in name:
            tensor[5] *= 0.01
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_massive_channel_is_no_alarm(tmp_path: Path, dtype: torch.dtype) -> None:
    ours, theirs = llama(tmp_path)
    for place in (ours, theirs):
        massive_channel(place)
    a, b = NativeSide(ours), TransformersSide(theirs)
    assert a.spec is not None
    verdict = verify(a, b, random_prompt(a.spec), dtype=dtype, longest=0)
    assert verdict.status == "equal"
    assert max(tap.gap for tap in verdict.passes[0].comparison.taps) > 0.01


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_limit_of_a_config_is_a_positive_integer(name: str) -> None:
    found = limits_of(
        None, [{name: value, "inner": {name: value}} for value in (True, False, None, 0, -1, 2.0, "900", [9], 77)]
    )
    assert [(limit.tokens, limit.name) for limit in found] == [(77, name)]


def test_lengths_pass_every_limit_of_spec_and_config() -> None:
    yarn = {"kind": "yarn", "factor": 4.0, "original": 700}
    spec = from_yaml(LLAMA).set("layers.*.mixer.position.scaling", yarn)
    limits = limits_of(spec, [{"rope_parameters": {"original_max_position_embeddings": 900}, "sliding_window": None}])
    assert [limit.tokens for limit in limits] == [700, 900]
    assert long_length(spec, limits, longest=4096, seconds_per_token=1e-4).tokens == 905
    bounded = long_length(spec, limits, longest=800, seconds_per_token=1e-4)
    assert (bounded.tokens, [limit.tokens for limit in bounded.beyond]) == (800, [900])
    assert "--longest" in bounded.reason
    slow = long_length(spec, limits, longest=4096, seconds_per_token=1.0)
    assert (slow.tokens, len(slow.beyond)) == (60, 2)
    assert "60 seconds" in slow.reason
