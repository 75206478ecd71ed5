"""Where two implementations diverge: a seeded bug is found in its layer and named; clean pairs are equal in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Seeded, llama
from torch import nn

from dovetail.base.errors import FileError
from dovetail.proof.compare.check import Verdict, verify
from dovetail.proof.compare.prompt import random_prompt
from dovetail.proof.compare.sides import NativeSide
from dovetail.proof.compare.transformers_side import TransformersSide


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return llama(tmp_path_factory.mktemp("llama"))


def found(places: tuple[Path, Path], plant: Callable[[Any], None]) -> Verdict:
    a, b = NativeSide(places[0]), Seeded(places[1], plant)
    assert a.spec is not None
    return verify(a, b, random_prompt(a.spec))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_pairs_are_equal(places: tuple[Path, Path], dtype: torch.dtype) -> None:
    a, b = NativeSide(places[0]), TransformersSide(places[1])
    assert a.spec is not None
    verdict = verify(a, b, random_prompt(a.spec), dtype=dtype)
    assert verdict.status == "equal"
    assert len(verdict.comparison.taps) == 44  # 13 in each of three layers, before and behind them, and the head
    assert not verdict.comparison.missing
    assert max(tap.exact for tap in verdict.comparison.taps) < 1e-12  # no float32 is left in their float64 run


def unscaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 1.0


def norms_exchanged(model: Any) -> None:
    layer = model.model.layers[2]
    layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm


def other_eps(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-6


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def on_its_side(model: Any) -> None:
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.copy_(weight.T.clone())


def skipped(model: Any) -> None:
    model.model.layers[1].forward = lambda x, *_, **__: x


def scaled_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.mul_(48**0.5)


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def no_last_norm(model: Any) -> None:
    model.model.norm = nn.Identity()


def noise(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight[3] += 0.01


@pytest.mark.parametrize(
    ("plant", "first", "layer", "cause"),
    [
        (unscaled, "layers.1.mixer.o.in", "layers.1", "score scale"),
        pytest.param(norms_exchanged, "layers.2.mixer_norm", "layers.2", "swapped norms", marks=pytest.mark.slow),
        (other_eps, "layers.1.ffn_norm", "layers.1", "norm's eps"),
        pytest.param(other_activation, "layers.0.ffn.down.in", "layers.0", "activation", marks=pytest.mark.slow),
        pytest.param(on_its_side, "layers.1.mixer.o", "layers.1", "transposed weight", marks=pytest.mark.slow),
        pytest.param(skipped, "layers.1", "layers.1", "layer skipped", marks=pytest.mark.slow),
        (scaled_embedding, "layers.0.in", "embed", "embedding scale"),
        (tied, "head.out", "head", "tied head"),
        pytest.param(no_last_norm, "norm", "head", "norm missing", marks=pytest.mark.slow),
    ],
)
def test_a_seeded_bug_is_found_and_named(
    places: tuple[Path, Path], plant: Callable[[Any], None], first: str, layer: str, cause: str
) -> None:
    verdict = found(places, plant)
    assert verdict.status == "structural"
    assert verdict.first is not None
    assert (verdict.first.address, verdict.layer) == (first, layer)
    assert verdict.cause is not None
    assert verdict.cause.name == cause


def test_other_numbers_in_a_weight_are_named_where_nothing_else_fits(places: tuple[Path, Path]) -> None:
    verdict = found(places, noise)
    assert verdict.layer == "layers.2"
    assert verdict.cause is None
    assert [one.path for one in verdict.weights] == ["layers.2.ffn.up.weight"]


def test_a_directory_that_names_code_is_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    text = (places[1] / "config.json").read_text().replace("{", '{"auto_map": {"AutoModel": "evil.Model"},', 1)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FileError, match="auto_map"):
        TransformersSide(tmp_path)
