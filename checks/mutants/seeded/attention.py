"""Seeded bugs of attention: masks, kernels, head groups, and the scale of scores."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Fill
from dovetail.nn.layout import TokenLayout
from dovetail.ops import attend_ref, attend_sets, attend_tiled, mask
from dovetail.parts.mask.distance import Causal, Window
from dovetail.parts.mixer.attention import AttentionModule
from dovetail.proof.laws.mutant import Mutant, instead, kernel, spec
from dovetail.proof.laws.suite import OWN_NUMBER

_ref, _tiled, _setup = attend_ref.run, attend_tiled.run, AttentionModule.setup
_project = AttentionModule.project
_prefix_scores, _prefix_values = attend_sets.prefix_scores, attend_sets.prefix_values


def norm_before_rotation(self: AttentionModule) -> None:
    _setup(self)
    self.part = dc.replace(self.part, qk_norm_after=False)


def values_scaled_as_keys(self: AttentionModule, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _project(self, x, ctx)
    norm = self.modules_named("k_norm") if self.part.k_is_v else None
    return q, k, v if norm is None else v * norm.scale


def values_not_normed(self: AttentionModule) -> None:
    _setup(self)
    self.part = dc.replace(self.part, v_norm=None)


def window_sees_one_more(self: Window, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
    return (q.order[..., :, None] - k.order[..., None, :]).abs()[..., None, :, :] <= self.size


def causal_sees_the_next(self: Causal, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
    return (q.order[..., :, None] - k.order[..., None, :])[..., None, :, :] >= -1


def padding_visible(q: TokenLayout, k: TokenLayout) -> Tensor:
    same = (q.seg[..., :, None] == k.seg[..., None, :]) | (k.seg < 0)[..., None, :]
    return same if q.row is None or k.row is None else same & (q.row[..., :, None] == k.row[..., None, :])


def documents_mixed(q: TokenLayout, k: TokenLayout) -> Tensor:
    real = (q.seg >= 0)[..., :, None] & (k.seg >= 0)[..., None, :]
    return real if q.row is None or k.row is None else real & (q.row[..., :, None] == k.row[..., None, :])


def rows_mixed(q: TokenLayout, k: TokenLayout) -> Tensor:
    return (q.seg[..., :, None] == k.seg[..., None, :]) & (q.seg >= 0)[..., :, None]


def nan_in_fully_masked_rows(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, visible: Any, edit: Any
) -> Tensor:
    out = _ref(q, k, v, scoring, q_layout, k_layout, visible, edit)
    return out.masked_fill(visible[1], torch.nan)


def heads_in_the_wrong_order(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, visible: Any, edit: Any
) -> Tensor:
    shared = q.shape[-3] // k.shape[-3]
    repeat = [1] * (k.dim() - 3) + [shared, 1, 1]
    return _ref(q, k.repeat(repeat), v.repeat(repeat), scoring, q_layout, k_layout, visible, edit)


def softcap_ignored(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, visible: Any, edit: Any
) -> Tensor:
    return _tiled(q, k, v, dc.replace(scoring, softcap=None), q_layout, k_layout, visible, edit)


def prefix_left_out(
    q: Tensor, k: Tensor, v: Tensor, scoring: Any, q_layout: TokenLayout, k_layout: TokenLayout, visible: Any, edit: Any
) -> Tensor:
    return _tiled(q, k, v, dc.replace(scoring, prefix=None), q_layout, k_layout, visible, edit)


def prefix_not_capped(q: Tensor, scoring: Any) -> Tensor:
    return _prefix_scores(q, dc.replace(scoring, softcap=None))


def prefix_of_wrong_heads(probs: Tensor, scoring: Any) -> Tensor:
    k, v = scoring.prefix
    return _prefix_values(probs, dc.replace(scoring, prefix=(k, v.flip(1))))


def prefix_averaged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    return (out + more) / 2, torch.logaddexp(lse, more_lse)


def full_tiles_skipped(self: Causal, q: Any, k: Any, head: int) -> Fill:
    return Fill.EMPTY if k.high <= q.low else Fill.PART


def scale_ignored(self: AttentionModule) -> None:
    _setup(self)
    self.scale = 1.0


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    window, capped = spec(mask=["causal", {"kind": "window", "size": 5, "keep": 1}]), spec(softcap=2.0)
    prefixed, capped_prefix = spec(prefix=3), spec(prefix=3, softcap=2.0)
    llama = spec(width=30)  # transformers requires that the heads divide the width
    return [
        Mutant("a token sees the next one", "causal", instead(Causal, "visible", causal_sees_the_next), spec(position="alibi")),
        Mutant(
            "QK-norm stands before the rotation, where it belongs behind it",
            "every_field",
            instead(AttentionModule, "setup", norm_before_rotation),
            spec(qk_norm="rmsnorm", qk_norm_after=True),
        ),
        Mutant(
            "values that are keys have the scale of the keys' norm",
            OWN_NUMBER,
            instead(AttentionModule, "project", values_scaled_as_keys),
            spec(qk_norm="rmsnorm", k_is_v=True),
        ),
        Mutant(
            "values are not normed",
            "every_field",
            instead(AttentionModule, "setup", values_not_normed),
            spec(v_norm={"kind": "rmsnorm", "scale": False}),
        ),
        Mutant(
            "padding is visible",
            "padded",
            instead(mask, "same_document", padding_visible),
            report="transformers#47651",
        ),
        Mutant(
            "a fully masked row gives NaN",
            "padded",
            kernel("reference", nan_in_fully_masked_rows),
            capped,
            "unsloth#9848",
        ),
        Mutant(
            "packed documents see each other",
            "padded",
            instead(mask, "same_document", documents_mixed),
            report="axolotl#1375",
        ),
        Mutant(
            "a request sees its neighbors in a flat batch",
            "padded",
            instead(mask, "same_document", rows_mixed),
            report="vllm#1069",
        ),
        Mutant(
            "the tiled kernel ignores the soft-cap",
            "fast",
            kernel("tiled", softcap_ignored),
            capped,
            "TransformerLens#693",
        ),
        Mutant("the tiled kernel leaves the prefix out", "fast", kernel("tiled", prefix_left_out), prefixed),
        Mutant("prefix and tokens are averaged alike", "fast", instead(attend_sets, "merged", prefix_averaged), prefixed),
        Mutant(
            "the prefix has values of other KV heads",
            "fast",
            instead(attend_ref, "prefix_values", prefix_of_wrong_heads),
            prefixed,
        ),
        Mutant(
            "the scores of a prefix are not capped",
            "fast",
            instead(attend_ref, "prefix_scores", prefix_not_capped),
            capped_prefix,
        ),
        Mutant("query heads are matched with the wrong KV heads", "fast", kernel("reference", heads_in_the_wrong_order)),
        Mutant("full tiles are skipped as empty", "fast", instead(Causal, "tile", full_tiles_skipped)),
        Mutant(
            "scores are not scaled",
            "ported",
            instead(AttentionModule, "setup", scale_ignored),
            llama,
            report="TransformerLens#693",
        ),
        Mutant("a window of w sees w + 1", OWN_NUMBER, instead(Window, "visible", window_sees_one_more), window, "vllm#3385"),
    ]
