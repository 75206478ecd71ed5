"""Which engine can serve a spec: reasons with paths, from declarations that hold for the modules themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_specs import CASES, sharded

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError
from dovetail.files.spec import from_mapping
from dovetail.hf.hf import to_hf
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask, Mixer
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Entries
from dovetail.ops.attend import WHOLE, StoredEntries
from dovetail.serving.can_serve import Reason, can_serve, require
from dovetail.spec.part import KINDS, from_data

MASKS = [
    {"kind": kind, field: value}
    for kind, cls in sorted(KINDS.items())
    if issubclass(cls, Mask)
    for field, values in (cls.proof.samples or {"": [None]}).items()
    for value in values
]
NESTED = [
    ["causal", {"kind": "window", "size": 5}, {"kind": "window", "size": 9}],
    ["causal", {"kind": "window", "size": 5, "keep": 2}],
    ["causal", "full"],
    {"any": ["causal", {"kind": "window", "size": 3}]},
]


@pytest.mark.parametrize("data", [*MASKS, *NESTED], ids=str)
def test_a_band_is_the_whole_mask(data: Any) -> None:
    mask = from_data({name: value for name, value in data.items() if name} if isinstance(data, dict) else data, Mask)
    band = mask.band()
    layout = TokenLayout.whole(1, 23)
    visible = mask.visible(layout, layout, torch.arange(6))[0]
    distance = torch.arange(23)[:, None] - torch.arange(23)
    if band is not None:
        behind, ahead = (23 if bound is None else bound for bound in band)
        assert torch.equal(((distance <= behind) & (-distance <= ahead)).expand(visible.shape), visible)
    else:
        assert mask.flag() is None


def test_causal_windows_have_a_band() -> None:
    window = from_data(["causal", {"kind": "window", "size": 5}], Mask).band()
    assert window is not None
    assert (window.behind, window.ahead) == (4, 0)
    assert from_data({"kind": "window", "size": 5, "keep": 2}, Mask).band() is None
    assert from_data({"kind": "strided", "step": 2}, Mask).band() is None


class Asked(StoredEntries):
    """Entries that note whether they were read."""

    read = False

    def entries(self) -> Entries:
        Asked.read = True
        return super().entries()


class AskedView:
    """The view of a whole pass with such entries."""

    def append(self, layout: TokenLayout, *entries: Tensor) -> Asked:
        return Asked(layout, entries)

    append_blocks, stored = append, WHOLE.stored


def with_mixer(kind: str) -> dict[str, Any]:
    fields = {"heads": 4, "kv_heads": 2} if kind == "attention" else {}
    return {"width": 48, "vocab": 20, "layers": [{"mixer": {"kind": kind, **fields}, "ffn": {"hidden": 24}}]}


def cached_mixers() -> list[str]:
    """The kinds of mixer with entries per token that stand alone in a layer."""
    found: list[str] = []
    for kind, cls in sorted(KINDS.items()):
        if issubclass(cls, Mixer) and not cls().reads_encoder():
            mixer = from_mapping(with_mixer(kind)).layers[0].mixer
            found += [kind] * (mixer is not None and not mixer.recurrent)
    return found


@pytest.mark.parametrize("kind", cached_mixers())
def test_a_mixer_that_attends_never_reads_its_entries(kind: str) -> None:
    spec = from_mapping(with_mixer(kind))
    (mixer,) = spec.layers[0].mixers().values()
    model, Asked.read = dt.build(spec), False
    model(torch.randint(20, (1, 9)), Ctx(layout=TokenLayout.whole(1, 9), views=[{"mixer": AskedView()}]))
    assert mixer.attends != Asked.read


@pytest.mark.parametrize("name", CASES)
def test_vllm_takes_specs_that_no_family_can_express(name: str) -> None:
    assert can_serve(CASES[name].spec) == []
    with pytest.raises(SpecError):
        to_hf(CASES[name].spec)


def spec_with(mixer: dict[str, Any], **fields: Any) -> dt.Model:
    attention = {"heads": 4, "kv_heads": 2, "head": 32, **mixer}
    return from_mapping(
        {
            "width": 96,
            "vocab": 101,
            "layers": [{"mixer": {"heads": 4, "kv_heads": 2, "head": 32}}, {"mixer": attention}],
            **fields,
        }
    )


REFUSED = [
    ({"mask": ["causal", {"kind": "window", "size": 8, "keep": 2}]}, "layers.1.mixer.mask", "neither causal"),
    ({"mask": {"any": ["causal", {"kind": "prefix", "length": 4}]}}, "layers.1.mixer.mask", "neither causal"),
    ({"mask": ["causal", {"kind": "strided", "step": 3}]}, "layers.1.mixer.mask", "neither causal"),
    ({"position": {"kind": "t5_bias", "shared": False}}, "layers.1.mixer.position", "adds a bias"),
    ({"position": {"kind": "rope", "when": "read"}}, "layers.1.mixer.position", "when they are read"),
    ({"position": {"kind": "rope", "scaling": "dynamic_ntk"}}, "layers.1.mixer.position", "computed in chunks"),
    ({"head": 40}, "layers.1.mixer", "heads of 40"),
    ({"earlier": {"kind": "shared_kv", "layer": 0}}, "layers.1.mixer", "KV cache of layers.0.mixer"),
]


@pytest.mark.parametrize(("mixer", "path", "why"), REFUSED, ids=str)
def test_vllm_refuses_with_path_and_reason(mixer: dict[str, Any], path: str, why: str) -> None:
    reasons = can_serve(spec_with(mixer))
    assert [reason.path for reason in reasons if why in reason.problem] == [path], reasons
    with pytest.raises(SpecError, match="vllm cannot serve it"):
        require(spec_with(mixer), "vllm")


@pytest.mark.parametrize(("preset", "path"), [("mamba2-hybrid-tiny", "layers.3.mixer"), ("t5-tiny", "encoder")])
def test_the_native_engine_takes_what_vllm_refuses(preset: str, path: str) -> None:
    spec = dt.load_spec(preset)
    assert can_serve(spec)[0].path == path
    assert can_serve(spec, "native") == []
    assert can_serve(spec, "native", 2) == [Reason("tp", "2 ranks; the native engine runs on one device", "use 1")]


@pytest.mark.parametrize("preset", ["mamba2-tiny", "mamba-tiny", "rwkv6-tiny", "gla-tiny", "linear-attention-tiny"])
def test_vllm_takes_recurrent_states(preset: str) -> None:
    assert can_serve(dt.load_spec(preset)) == []


def test_a_hybrid_is_refused_for_its_attention_alone() -> None:
    spec = dt.load_spec("mamba2-hybrid-tiny")
    assert [reason.path for reason in can_serve(spec)] == ["layers.3.mixer"]
    assert can_serve(spec.set("layers.3.mixer.head", 32)) == []


@pytest.mark.parametrize("name", sharded())
def test_vllm_takes_them_on_two_ranks(name: str) -> None:
    assert can_serve(sharded()[name].spec, tp=2) == []


def test_vllm_refuses_ranks_that_cannot_share_the_heads() -> None:
    (reason,) = can_serve(spec_with({"heads": 3, "kv_heads": 1}), tp=2)
    assert reason.path == "layers.1.mixer.q.weight"
    assert "heads = 3 cannot be cut over 2" in reason.problem


def test_a_model_that_does_not_generate_has_no_engine() -> None:
    for engine in ("native", "vllm"):
        assert can_serve(dt.load_spec("bert-tiny"), engine)[0].path == "head"
    with pytest.raises(UsageError, match="native, vllm"):
        can_serve(dt.load_spec("llama-tiny"), "trt")
