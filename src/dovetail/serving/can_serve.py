"""can_serve: whether an engine can serve a spec, from what its parts declare; no engine is imported.

    native    every spec that generates
    vllm      specs whose decode state is KV caches of softmax attention and recurrent states, with a score rule that vLLM's
              attention layer has: scale, soft-cap, sink logits, ALiBi slopes, causal masks with or without a window, per layer

Each reason has the path of the part, what the engine lacks and what to do. The limits of vLLM are those of its CPU backend in
version 0.32; of its head sizes 32, 64, 80 and 96 were run (tests/serve/test_vllm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dovetail.base.errors import SpecError, UsageError, names_or_nearest
from dovetail.decoding.generation import check_generates
from dovetail.model.model import Model
from dovetail.nn.groups import Position
from dovetail.nn.softmax import SoftmaxMixer
from dovetail.parallel.placement import placed, tp_regions
from dovetail.spec.check import check
from dovetail.spec.fold import declared
from dovetail.spec.part import Part, join, walk
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPU
KV_CACHE = ("token", ("kv_heads", "head"))
CARRIED = frozenset({"softcap", "sink", "bias"})  # needs of a score rule that vLLM's attention layer has
NATIVE = "serve it with the native engine"


class Reason(NamedTuple):
    """Why an engine cannot serve a spec: the path of the part, what the engine lacks, what to do."""

    path: str
    problem: str
    remedy: str = NATIVE

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.remedy}"


class Attending(NamedTuple):
    """A mixer whose KV cache and attention an engine may take over."""

    path: str
    part: SoftmaxMixer
    scope: Scope
    state: State

    @property
    def window(self) -> int | None:
        """The window in tokens, the query included; None: no window."""
        band = self.part.visibility().band()
        return None if band is None or band.behind is None else band.behind + 1


class Recurring(NamedTuple):
    """A mixer whose recurrent state an engine may store."""

    path: str
    part: Part
    scope: Scope
    states: list[State]


def can_serve(spec: Model, engine: str = "vllm", tp: int = 1) -> list[Reason]:
    """Return the reasons why an engine, `native` or `vllm`, cannot serve a spec on `tp` ranks; none where it can. A spec that
    cannot be built raises SpecError."""
    if engine not in ENGINES:
        raise UsageError(f"engine: {engine!r} is unknown; {names_or_nearest(engine, ENGINES, 'engines')}")
    check(spec)
    return list(ENGINES[engine](spec, tp))


def require(spec: Model, engine: str, tp: int = 1) -> None:
    """Raise SpecError with the first reason why an engine cannot serve a spec, and the number of others."""
    reasons = can_serve(spec, engine, tp)
    if reasons:
        path, problem, remedy = reasons[0]
        more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        raise SpecError(path, f"{engine} cannot serve it: {problem}{more}", remedy)


def attending(spec: Model) -> Iterator[Attending]:
    """The mixers whose only state is a KV cache that `KV.attend` alone reads."""
    for path, part, scope in walk(spec):
        states = part.state(scope)
        layouts = [(state.per, state.axes) for state in states]
        if isinstance(part, SoftmaxMixer) and part.attends and not scope.drafts and layouts == [KV_CACHE]:
            yield Attending(path, part, scope, states[0])


def recurring(spec: Model) -> Iterator[Recurring]:
    """The mixers whose decode state is recurrent alone."""
    for path, part, scope in walk(spec):
        states = part.state(scope)
        if states and not scope.drafts and all(state.per == "sequence" for state in states):
            yield Recurring(path, part, scope, states)


def _native(spec: Model, tp: int) -> Iterator[Reason]:
    yield from _generates(spec)
    if tp > 1:
        yield Reason("tp", f"{tp} ranks; the native engine runs on one device", "use 1")


def _vllm(spec: Model, tp: int) -> Iterator[Reason]:
    yield from _generates(spec)
    if tp > 1:
        yield from _ranks(spec, tp)
    if spec.encoder is not None:
        yield Reason("encoder", "its output would need a cache of its own")
    if not spec.embed.token_ids:
        yield Reason("embed", f"{spec.embed.kind} takes other inputs than token ids")
    attended, recurrent = {one.path: one for one in attending(spec)}, {one.path for one in recurring(spec)}
    for path, part, scope in walk(spec):
        if scope.drafts:
            continue
        if (why := part.whole_prefill(scope)) is not None:
            yield Reason(path, f"prompts are computed in chunks, and {why}")
        if path in attended:
            yield from _attention(attended[path])
        elif path not in recurrent and (states := part.state(scope)):
            yield Reason(path, _other_state(part, states))


def _ranks(spec: Model, tp: int) -> Iterator[Reason]:
    try:
        placed(declared(spec), list(tp_regions(spec, whole=whole_axes(spec, tp))), tp)
    except SpecError as error:
        yield Reason(error.path, error.problem, f"use fewer ranks, or {NATIVE}")


def whole_axes(spec: Model, tp: int) -> frozenset[str]:
    """The axes that parts shard themselves, as the vocabulary, of which `tp` ranks cannot hold equal shards: each rank holds
    them whole."""
    return frozenset(axis for _, part, scope in walk(spec) for axis in part.tp_axes if scope.size(axis) % tp)


def cut_axes(spec: Model, tp: int) -> dict[str, int]:
    """The axes that are sharded across `tp` ranks, and into how many shards."""
    regions = tp_regions(spec, whole=whole_axes(spec, tp)) if tp > 1 else ()
    return {axis: tp for one in regions for axis in one.shared_out}


def _generates(spec: Model) -> Iterator[Reason]:
    try:
        check_generates(spec)
    except SpecError as error:
        yield Reason(error.path, error.problem, error.remedy)


def _other_state(part: Part, states: Sequence[State]) -> str:
    """Why states other than the KV cache of softmax attention, or recurrent states alone, cannot be served."""
    per = {state.per for state in states}
    if "sequence" in per:
        return f"{part.kind} has a recurrent state beside a KV cache, and vLLM gives a mixer one of them"
    if "source" in per:
        return f"{part.kind} caches an encoder output"
    return f"{part.kind} reads the entries of its KV cache itself, which vLLM keeps in its attention layer"


def _attention(one: Attending) -> Iterator[Reason]:
    path, part, scope = one.path, one.part, one.scope
    mask, size = part.visibility(), scope.size("head")
    band = mask.band()
    if band is None or band.ahead != 0:
        what = f"{mask.kind} is neither causal nor a causal window, and vLLM's attention has no other mask"
        yield Reason(join(path, "mask"), what)
    for name, position in part.parts().items():
        if isinstance(position, Position):
            yield from _position(join(path, name), position)
    if lacking := part.needs() - CARRIED - {"bias_grad"}:  # gradients do not matter here
        yield Reason(path, f"vLLM's attention has no {', '.join(sorted(lacking))}")
    if size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        yield Reason(path, f"heads of {size}; vLLM's attention on CPU has {sizes}", "give `head` one of these, or " + NATIVE)
    if one.state.same_as is not None:
        yield Reason(path, f"reads the KV cache of {one.state.same_as}, which was not tested")


def _position(path: str, position: Position) -> Iterator[Reason]:
    if position.rotates_on_read():
        yield Reason(path, f"{position.kind} rotates keys when they are read from the KV cache", "rotate them on write")
    if "bias" in position.needs() and position.slope is None:
        yield Reason(path, f"{position.kind} adds a bias to the scores that is not a slope per head times the distance")


ENGINES: dict[str, Callable[[Model, int], Iterator[Reason]]] = {"native": _native, "vllm": _vllm}
