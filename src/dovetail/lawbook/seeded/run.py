"""Seeded bugs, most of them shipped by someone once, one at a time: the law named with each must fail.

A law never seen to fail proves nothing. Each row says what goes wrong, the law that must see it, the spec it is seeded in and
the mutated function; before the bug is seeded the law must hold there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.core.layout import TokenLayout
from dovetail.core.part import Part, walk_spec
from dovetail.core.weight import State, Weight
from dovetail.core.wire import WireModule
from dovetail.dist import context, shard
from dovetail.io.spec import to_yaml
from dovetail.lawbook import ported, sharded
from dovetail.lawbook.case import LAWS, Broken, Case, NotApplicable
from dovetail.lawbook.oracle import check_oracles
from dovetail.lawbook.seeded import (
    attention,
    cells,
    early,
    families,
    linear_attention,
    mla,
    moe,
    nsa,
    port,
    recurrent,
    streaming,
)
from dovetail.lawbook.seeded.bug import Mutant, instead, kernel, spec
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.ops import mask
from dovetail.parts.ffn.glu import GluModule
from dovetail.parts.mask.near import Causal, Window
from dovetail.parts.mixer.attention import Attention, AttentionModule
from dovetail.parts.norm import RMSNormModule
from dovetail.parts.position.alibi import AlibiModule
from dovetail.parts.position.learned import LearnedModule
from dovetail.parts.position.rope import RopeModule
from dovetail.parts.position.scaling import Dynamic, Yarn
from dovetail.state import frame, slots
from dovetail.state.pool import Pool

AREAS = (
    cells,
    early,
    moe,
    families,
    mla,
    linear_attention,
    port,
    recurrent,
    nsa,
    streaming,
)

# -- the table -------------------------------------------------------------------------------------------------------------

WINDOW = [{"kind": "causal"}, {"kind": "window", "size": 5, "keep": 1}]
FIVE = [{"kind": "causal"}, {"kind": "window", "size": 5}]


def _mutants() -> list[Mutant]:
    window, alibi, capped = spec(mask=WINDOW), spec(position="alibi"), spec(softcap=2.0)
    yarn = {"kind": "rope", "scaling": {"kind": "yarn", "original": 200, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}}
    dynamic = {"kind": "rope", "scaling": {"kind": "dynamic", "original": 8}}
    biased = spec(bias=True, out_bias=True)
    learned = spec(position="none").set("position", {"kind": "learned", "length": 64})
    llama = spec(width=30)  # the reference wants heads to divide the width
    return [
        Mutant(
            "the count of state ignores windows",
            "declared",
            instead(State, "entries", attention.pattern_of_layers_ignored),
            spec(mask=FIVE),
            "hf-mem#61",
        ),
        Mutant(
            "the cache is as large as with full heads",
            "declared",
            instead(Attention, "state", attention.grouped_heads_not_counted),
            report="hf-mem#61",
        ),
        Mutant(
            "half of the attention products are not counted",
            "declared",
            instead(Attention, "cost", attention.half_the_products),
        ),
        Mutant("a field that is false is not written", "round_trip", instead(Part, "changed", attention.false_is_default)),
        Mutant(
            "a trained head is not saved, as if it were tied",
            "round_trip",
            instead(Weight, "learned", property(attention.tables_never_saved)),
            report="transformers#45127",
        ),
        Mutant("a token sees the next one", "causal", instead(Causal, "visible", attention.one_ahead), spec(position="alibi")),
        Mutant(
            "rotary positions count from the start of the call",
            "chunked",
            instead(RopeModule, "angles", attention.by_place_in_the_call),
            report="x-transformers#219",
        ),
        Mutant(
            "ALiBi is zero at every decode step",
            "chunked",
            instead(AlibiModule, "score", attention.flat_at_decode),
            alibi,
            "keras-hub#2977",
        ),
        Mutant(
            "a decoded key is never written",
            "chunked",
            instead(frame.TokenView, "extend", attention.old_keys_only),
            report="TransformerLens#776",
        ),
        Mutant(
            "a window is wrong once its ring has filled",
            "chunked",
            instead(slots.Ring, "positions", attention.ring_too_short),
            window,
            "transformers#37574",
        ),
        Mutant(
            "a ring overwrites the tokens it should keep",
            "chunked",
            instead(slots.Ring, "slot", attention.ring_keeps_nothing),
            window,
            "vllm#3385",
        ),
        Mutant(
            "a mask of an earlier step is used again",
            "chunked",
            instead(TokenLayout, "once_for", attention.stale_answer),
            spec(mask=FIVE),
            "x-transformers#311",
        ),
        Mutant(
            "left padding moves positions",
            "padded",
            instead(LearnedModule, "embed", attention.padding_counted),
            learned,
            "transformers#22707",
        ),
        Mutant(
            "padding is looked at",
            "padded",
            instead(mask, "same_document", attention.padding_seen),
            report="transformers#47651",
        ),
        Mutant(
            "a row that sees nothing gives NaN",
            "padded",
            kernel("reference", attention.nan_where_nothing_is_seen),
            capped,
            "unsloth#9848",
        ),
        Mutant(
            "packed documents see each other",
            "padded",
            instead(mask, "same_document", attention.documents_mixed),
            report="axolotl#1375",
        ),
        Mutant(
            "a request sees its neighbors in a flat batch",
            "padded",
            instead(mask, "same_document", attention.rows_mixed),
            report="vllm#1069",
        ),
        Mutant(
            "the tiled kernel forgets the soft-cap",
            "fast",
            kernel("tiled", attention.cap_forgotten),
            capped,
            "TransformerLens#693",
        ),
        Mutant(
            "query heads are matched with the wrong key heads", "fast", kernel("reference", attention.heads_in_the_wrong_order)
        ),
        Mutant("full tiles are taken for empty ones", "fast", instead(Causal, "tile", attention.skipped_when_full)),
        Mutant("rolling back does nothing", "rollback", instead(Pool, "rollback", attention.back_without_going)),
        Mutant(
            "a wrapped ring is not brought back to its mark",
            "rollback",
            instead(Pool, "_to_mark", attention.mark_forgotten),
            window,
        ),
        Mutant(
            "a page shared by a fork is written to",
            "rollback",
            instead(slots.Paged, "reserve", attention.pages_shared_for_ever),
        ),
        Mutant("a fork starts with nothing", "rollback", instead(slots.Contiguous, "fork", attention.fork_loses)),
        Mutant(
            "a bias is added once on every rank", "sharded", instead(shard, "_reader", attention.counted_on_every_rank), biased
        ),
        Mutant("a gradient stays on the rank it came to", "sharded", instead(shard, "enter", attention.gradient_of_one_rank)),
        Mutant(
            "pieces of a sequence are joined in reverse", "sharded", instead(context, "gather", attention.pieces_in_reverse)
        ),
        Mutant(
            "a tap called mixer_add holds something else",
            "tapped",
            instead(WireModule, "added", attention.residual_sum_tapped),
            report="TransformerLens#1639",
        ),
        Mutant(
            "a fused kernel hides the pattern",
            "tapped",
            instead(AttentionModule, "edit", attention.pattern_never_shown),
            report="pytorch#119811",
        ),
        Mutant(
            "a block looks at a value while it is compiled",
            "compiled",
            instead(RMSNormModule, "forward", attention.breaks_the_graph),
        ),
        Mutant(
            "a norm's spread is a constant in backward",
            "gradient",
            instead(RMSNormModule, "forward", attention.spread_held_fixed),
        ),
        Mutant(
            "rotary pairs are interleaved everywhere",
            "ported",
            instead(RopeModule, "turn", attention.pairs_adjacent),
            llama,
            report="llama.cpp#3018",
        ),
        Mutant(
            "scores are not scaled",
            "ported",
            instead(AttentionModule, "setup", attention.scale_forgotten),
            llama,
            report="TransformerLens#693",
        ),
        Mutant(
            "keys and shapes agree, two norms are exchanged",
            "ported",
            instead(ported, "export_tensors", attention.norms_swapped),
            llama,
            report="open-instruct#1839",
        ),
        Mutant("gate and up are exchanged", "ported", instead(GluModule, "forward", attention.gate_and_up_swapped), llama),
        Mutant(
            "the wrong part of the head turns",
            OWN_NUMBER,
            instead(RopeModule, "turn", attention.turned_tail),
            report="TransformerLens#385",
        ),
        Mutant("a window of w sees w + 1", OWN_NUMBER, instead(Window, "visible", attention.one_more), window, "vllm#3385"),
        Mutant(
            "a field of YaRN is silently ignored",
            "every_field",
            instead(Yarn, "frequencies", attention.beta_ignored),
            spec(position=yarn),
            "Megatron-LM#6305",
        ),
        Mutant(
            "dynamic NTK forgets its factor",
            "every_field",
            instead(Dynamic, "at_length", attention.factor_ignored),
            spec(position=dynamic),
            "transformers#27227",
        ),
        Mutant(
            "a norm's weight is never trained", "every_weight", instead(RMSNormModule, "forward", attention.scale_not_learned)
        ),
    ]


def named() -> dict[str, Mutant]:
    """Every named bug."""
    rows = [*_mutants(), *(mutant for area in AREAS for mutant in area.mutants())]
    return {mutant.name: mutant for mutant in rows}


# -- running ---------------------------------------------------------------------------------------------------------------


def verdict(law: str, model: Model, seeded: str | None = None) -> str:
    """What the law says of a model, with a bug seeded or without: empty where it holds."""
    if law == OWN_NUMBER:
        kinds = {part.kind for _, part in _every_part(model)} | {"rope", "window"}
        return "; ".join(str(f) for f in check_oracles(sorted(kinds))[:1])
    if law == "sharded":
        return _sharded(model, seeded)
    try:
        LAWS[law].check(Case(model))
    except NotApplicable as reason:
        return f"not applicable: {reason}" if seeded is None else ""
    except Broken as broken:
        return str(broken)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _every_part(model: Model) -> Any:
    return (entry for entry in walk_spec(model) if entry[1].group not in ("model", "block"))


def _sharded(model: Model, seeded: str | None) -> str:
    """The bug must be seeded in the ranks themselves."""
    for how in sharded.SPLITS:
        found = sharded.the_pair().run(compare_planted, seeded, to_yaml(model), how)
        worst = max((one.worst for one in found), key=lambda item: item[1])
        if not worst[1] <= 1e-9:
            return f"{how}: {worst[0]} differs by {worst[1]:.3g}"
    return ""


def compare_planted(seeded: str | None, text: str, how: sharded.How) -> sharded.Compared:
    """The job of one rank: whole against sharded, with a bug."""
    if seeded is None:
        return sharded.compare(text, 0, how)
    with named()[seeded].plant():
        return sharded.compare(text, 0, how)


def run_named(told: Callable[[int, int, str], None] | None = None, quick: bool = False) -> dict[str, Any]:
    """Plant every bug (or those whose law needs no second process and no compiler); {mutants, caught, rows}."""
    chosen = [mutant for mutant in named().values() if not (quick and mutant.law in LAWS and LAWS[mutant.law].slow)]
    rows: list[dict[str, Any]] = []
    sound: dict[tuple[str, str], str] = {}
    for i, mutant in enumerate(chosen):
        if told is not None:
            told(i, len(chosen), mutant.name)
        key = (mutant.law, mutant.spec.key)
        if key not in sound:
            sound[key] = verdict(mutant.law, mutant.spec)
        with mutant.plant():
            said = verdict(mutant.law, mutant.spec, mutant.name)
        caught = bool(said) and not sound[key]
        why = (
            f"{mutant.law}: {said}"
            if caught
            else f"{mutant.law} {'fails without it: ' + sound[key] if sound[key] else 'holds'}"
        )
        rows.append({"name": mutant.name, "law": mutant.law, "report": mutant.report, "caught": caught, "by": why})
    return {"mutants": len(rows), "caught": sum(row["caught"] for row in rows), "rows": rows}
