"""Laws that need no declarations, on a model that is not ours (foreign.py); numbers and names are those of our own laws.

Each is an equality between runs of the model itself. A law that a model has no means for is not applicable, with the reason.
What a law could not try for want of means, though it could try the rest, it says in a note.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.construction import generator
from dovetail.lawbook.case import DERIVATIVE, Broken, NotApplicable, chosen
from dovetail.lawbook.foreign.make import first_line
from dovetail.lawbook.foreign.model import LENGTHS, Foreign, N
from dovetail.verification.record import answer_of

RHYTHMS = {
    "step by step": (1,) * N,
    "a prefill, then steps": (13,) + (1,) * (N - 13),
    "in chunks": (5, 1, 8, 1, 6),
}
DRAWS = 4  # a draw may leave an expert without a token
SILENT = 1e-13  # of the largest gradient: a weight whose effect cancels out gives rounding alone
COMPILED = 1e-5  # both sides in float32, the same operators
SOURCES = ("encoder_hidden_states", "encoder_outputs")  # what a model calls the source of its cross attention


@dc.dataclass(frozen=True)
class ForeignLaw:
    """A named equality; its check returns a note on what it could not try."""

    name: str
    number: int
    says: str
    check: Callable[[Foreign], str | None]


@dc.dataclass
class Found:
    """One law on one foreign model."""

    law: str
    state: str  # held, failed, not applicable
    detail: str = ""
    seconds: float = 0.0


FOREIGN: dict[str, ForeignLaw] = {}
Check = Callable[[Foreign], str | None]


def law(number: int, name: str, says: str) -> Callable[[Check], Check]:
    """Register a law for foreign models."""

    def decorate(check: Check) -> Check:
        FOREIGN[name] = ForeignLaw(name, number, says, check)
        return check

    return decorate


@law(3, "causal", "no later token changes an earlier answer")
@torch.no_grad()
def causal(case: Foreign) -> None:
    """Row t of one batch is the text with token t changed; row n is the text itself."""
    text, other = case.tokens[:1], case.drawn(1, "others")
    batch = text.repeat(N + 1, 1)
    for t in range(N):
        batch[t, t] = other[0, t] if other[0, t] != text[0, t] else case.tokens[1, t]
    out = case.answer(batch)
    for t in range(1, N):
        case.same(out[t, :t], out[N, :t], f"answers before token {t}, when it is changed")
    read = [t for t in range(N) if not torch.equal(batch[t], text[0]) and torch.equal(out[t, t:], out[N, t:])]
    case.true(not read, f"changing token {read[0] if read else 0} changes no answer at all")


@law(4, "chunked", "one pass, a prefill with steps, and any chunks with the model's own cache agree")
@torch.no_grad()
def chunked(case: Foreign) -> str | None:
    """The same tokens in several rhythms; then a batch padded on the left, prefilled and decoded."""
    memory = case.memory
    if memory is None:
        raise NotApplicable("it gives back no memory that it takes again")
    tokens, want = case.tokens[:2], case.answer(case.tokens[:2])
    for name, rhythm in RHYTHMS.items():
        case.same(_remembering(case, tokens, rhythm), want, name)
    if case.mask_reaches is None:
        return "it takes no attention_mask beside its memory: no padded batch was decoded"
    laid, mask, places = rows(LENGTHS, case.tokens, case.padding, left=True)
    got = _remembering(case, laid, (13,) + (1,) * (N - 13), mask, places if case.places else None)
    for r, length in enumerate(LENGTHS):
        alone = case.answer(case.tokens[r : r + 1, :length])[0]
        real = min(length, N - 13)  # what was decoded, of the real tokens
        case.same(got[r, -real:], alone[-real:], f"row {r}, {N - length} padded on the left, a prefill, then steps")
    return None


def _remembering(
    case: Foreign, tokens: Tensor, rhythm: Sequence[int], mask: Tensor | None = None, places: Tensor | None = None
) -> Tensor:
    """Answers (batch, n, …) to tokens that come in pieces."""
    memory, kept, out, done = case.memory, None, [], 0
    assert memory is not None
    for length in rhythm:
        how: dict[str, Any] = dict(memory.asked) | ({} if kept is None else {memory.argument: kept})
        if mask is not None:
            how["attention_mask"] = mask[:, 0 if case.mask_reaches == "all" else done : done + length]
        if places is not None:
            how["position_ids"] = places[:, done : done + length]
        given = case.call(tokens[:, done : done + length], **how)
        kept = memory.of(given)
        out.append(answer_of(given))
        done += length
    return torch.cat(out, 1)


@law(5, "padded", "neither padding (left or right), nor neighbors in a batch, nor packed documents change a token")
@torch.no_grad()
def padded(case: Foreign) -> str | None:
    """Each row alone, against the same one among neighbors, padding and other documents."""
    tokens, missing = case.tokens, []
    alone = [case.answer(tokens[r : r + 1, :length])[0] for r, length in enumerate(LENGTHS)]
    whole = case.answer(tokens)
    for r, length in enumerate(LENGTHS):
        if length == N:
            case.same(whole[r], alone[r], f"row {r} among neighbors and alone")
    if case.masks:
        for left in (False, True):
            laid, mask, places = rows(LENGTHS, tokens, case.padding, left)
            where = {"position_ids": places} if left and case.places else {}
            out, side = case.answer(laid, attention_mask=mask, **where), "left" if left else "right"
            for r, length in enumerate(LENGTHS):
                real = out[r, N - length :] if left else out[r, :length]
                case.same(real, alone[r], f"row {r}, {N - length} padded on the {side}, and alone")
    else:
        missing.append("it takes no attention_mask")
    if case.documents:
        row = torch.cat([tokens[r, :length] for r, length in enumerate(LENGTHS)])[None]
        places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        for r, document in enumerate(case.answer(row, position_ids=places, **case.forgetting)[0].split(LENGTHS)):
            case.same(document, alone[r], f"document {r} packed and alone")
    else:
        missing.append("nothing parts packed documents")
    return "; ".join(missing)


@law(11, "compiled", "compiled equals eager")
@torch.no_grad()
def compiled(case: Foreign) -> None:
    """Captured by torch.compile, the graph run as it is, in float32 as its author would."""
    model, tokens = case.single(), case.tokens[:2]
    want = answer_of(model(tokens))
    torch.compiler.reset()
    try:
        got = answer_of(torch.compile(model, backend="eager")(tokens))
    finally:
        torch.compiler.reset()
    case.same(got, want, "compiled and eager", COMPILED)


@law(12, "gradient", "directional derivatives agree with finite differences")
def gradient(case: Foreign) -> None:
    """One random direction through all weights at once."""
    if case.dtype != torch.float64 or case.tolerance > 1e-8:
        raise NotApplicable("it computes in float32, which is too coarse for differences")
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    direction = {
        n: torch.randn(p.shape, generator=generator(case.seed, f"direction {n}"), dtype=p.dtype) for n, p in named.items()
    }
    found = torch.autograd.grad(_scalar(case), list(named.values()), allow_unused=True)
    slope = sum(float((g * direction[name]).sum()) for name, g in zip(named, found, strict=True) if g is not None)

    @torch.no_grad()
    def moved(by: float) -> float:
        for name, p in named.items():
            p.add_(direction[name], alpha=by)
        value = float(_scalar(case))
        for name, p in named.items():
            p.sub_(direction[name], alpha=by)
        return value

    def by_differences(step: float) -> float:
        coarse, fine = ((moved(k * step) - moved(-k * step)) / (2 * k * step) for k in (2, 1))
        return (4 * fine - coarse) / 3  # Richardson: two step widths cancel the error of second order

    step, gap = 1e-5 / max(abs(slope), 10.0), float("inf")
    for smaller in (1, 32, 1024):  # perhaps a kink, or a choice of experts, lies within the step
        gap = min(gap, abs(by_differences(step / smaller) - slope) / max(abs(slope), 1.0))
        if gap <= DERIVATIVE:
            break
    case.true(gap <= DERIVATIVE, f"autograd says {slope:.6g}; differences are off by {gap:.1e} of it")


def _scalar(case: Foreign, draw: int = 0, **how: Any) -> Tensor:
    """A number that depends on every answer."""
    out = case.answer(case.tokens if not draw else case.drawn(len(LENGTHS), f"draw {draw}"), **{**case.forgetting, **how})
    return (
        out * torch.randn(out.shape, generator=generator(case.seed, f"scalar {draw}"), dtype=out.dtype)
    ).sum() / out.numel() ** 0.5


@law(16, "every_weight", "each weight, and each expert, has a gradient")
def every_weight(case: Foreign) -> str | None:
    """Check on several draws that each weight has a gradient. A gradient of rounding size is reported, and is not a failure."""
    how = _sources(case)
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    nested = any(name.endswith("_config") and isinstance(value, dict) for name, value in case.config.items())
    apart = _never_entered(case) if nested else set()  # a config within a config: it takes more than text
    meant = {name for name in named if not any(name.startswith(f"{module}.") for module in apart)}
    used: dict[str, Tensor] = {}  # of each weight, or of each expert of a bank: whether a gradient came
    felt: set[str] = set()
    for draw in range(DRAWS):
        found = torch.autograd.grad(_scalar(case, draw, **how), list(named.values()), allow_unused=True)
        grads = {name: g for name, g in zip(named, found, strict=True) if g is not None}
        scale = max(float(g.abs().max()) for g in grads.values())
        for name, g in grads.items():
            each = g.abs().flatten(1).amax(-1) if g.dim() == 3 else g.abs().amax()  # experts lie one behind the other
            used[name] = (each != 0) | used.get(name, torch.tensor(False))
            if bool((each > SILENT * scale).any()):
                felt.add(name)
        if all(name in used and bool(used[name].all()) for name in meant):
            break
    unused = {name for name in meant if name not in used or not bool(used[name].all())}
    case.true(not unused, f"no gradient: {_listed(unused)}")
    told = [f"not reached by tokens: {_listed(apart)}"] if apart else []
    rounding = meant - unused - felt
    return "; ".join(told + ([f"cancels out: {_listed(rounding)}"] if rounding else []))


def _sources(case: Foreign) -> dict[str, Any]:
    """Something for cross attention to look at, where the model takes it."""
    widths = {p.shape[-1] for p in case.model.parameters() if p.dim() == 2 and p.shape[0] == case.vocab}
    for name, width in [(name, width) for name in SOURCES if name in case.arguments for width in sorted(widths)]:
        source = torch.randn(len(LENGTHS), 7, width, generator=generator(case.seed, name), dtype=case.dtype)
        with contextlib.suppress(Exception):
            case.answer(case.tokens, **{name: source})
            return {name: source}
    return {}


@torch.no_grad()
def _never_entered(case: Foreign) -> set[str]:
    """Modules that tokens alone do not reach, the outermost ones: towers for images or sound."""
    entered: set[nn.Module] = set()
    handles = [m.register_forward_pre_hook(lambda m, args: entered.add(m)) for m in case.model.modules()]
    case.answer(case.tokens[:1])
    for handle in handles:
        handle.remove()
    idle = {name for name, m in case.model.named_modules() if name and not any(inner in entered for inner in m.modules())}
    return {name for name in idle if not any(name.startswith(f"{outer}.") for outer in idle)}


def _listed(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def rows(lengths: Sequence[int], tokens: Tensor, padding: int, left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of these lengths among padding: tokens, mask and positions, each (rows, n)."""
    laid, mask = torch.full_like(tokens, padding), torch.zeros_like(tokens)
    for r, length in enumerate(lengths):
        real = slice(tokens.shape[1] - length, None) if left else slice(0, length)
        laid[r, real], mask[r, real] = tokens[r, :length], 1
    return laid, mask, (mask.cumsum(-1) - 1).clamp(min=0)


# -- trying


def try_law(case: Foreign, name: str) -> Found:
    """One law on one model."""
    begin, before = time.perf_counter(), case.compared
    case.gaps.clear()
    try:
        detail = FOREIGN[name].check(case) or ""
        case.settle()
        state = "held" if case.compared > before else "failed"
        detail = detail if state == "held" else "the law compared nothing"
    except NotApplicable as reason:
        state, detail = "not applicable", str(reason)
    except Broken as broken:
        state, detail = "failed", str(broken)
    except Exception as error:
        state, detail = "failed", _raised(error)
    return Found(name, state, detail, round(time.perf_counter() - begin, 2))


def _raised(error: Exception) -> str:
    """An error of the model's, and where it was raised."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    where = "" if tb is None else f" ({Path(tb.tb_frame.f_code.co_filename).name}:{tb.tb_lineno})"
    return f"{first_line(error, 200)}{where}"


def told_names(only: Sequence[str] = ()) -> list[str]:
    """These laws for foreign models, or all, by their number; an error for a name that is none."""
    return chosen(FOREIGN, only)


def laws_on(case: Foreign, names: Sequence[str] = ()) -> Iterator[Found]:
    """The laws of these names, or all, on a model, by their number."""
    for name in told_names(names):
        yield try_law(case, name)
