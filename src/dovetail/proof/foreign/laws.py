"""Laws on foreign models (foreign/model.py), which need no declarations; numbers and names are those of the laws on specs.

Each is an equality between runs of the model itself. Where a model lacks a feature that a law needs (a cache, a mask), the law
is not applicable, with the reason; where a law can be tested in part, it returns a note on the rest.

Documents are also packed as the classes of transformers document it, with keyword arguments beside restarted positions:

    cu_seq_lens_q, cu_seq_lens_k    int32 (documents + 1): where each document begins, and the end of the last
    max_length_q, max_length_k      the longest document
    seq_idx                         int32 (1, n): the document of each token

Attention is separated by restarted positions alone; these arguments are for kernels and for recurrences. A class documents an
argument where its forward has it, or where `**kwargs: Unpack[…]` names it in a TypedDict.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.model.construction import generator
from dovetail.proof.compare.record import answer_of
from dovetail.proof.foreign.model import Foreign
from dovetail.proof.laws.case import ARRANGEMENTS, LENGTHS, Arrangement, N, rows_of
from dovetail.proof.laws.kernel import compare_derivatives
from dovetail.proof.laws.law import Laws, NotApplicable, Outcome

CHUNKINGS = {
    "step by step": (1,) * N,
    "a prefill, then steps": (13,) + (1,) * (N - 13),
    "in chunks": (5, 1, 8, 1, 6),
}
DRAWS = 4  # inputs that are tested: with one of them an expert may get no token
SILENT = 1e-13  # of the largest gradient: the gradient of a weight whose effect cancels is rounding only
COMPILED = 1e-5  # tolerance where both sides run the same operators in float32
SOURCES = ("encoder_hidden_states", "encoder_outputs")  # names of the argument that cross attention reads
RIGHT, LEFT, PACKED, *_ = ARRANGEMENTS
FOREIGN = Laws()
law = FOREIGN.law


@law(3, "causal", "no later token changes an earlier output")
@torch.no_grad()
def causal(case: Foreign) -> None:
    """Row t of one batch is the sequence with token t changed; row n is the sequence itself."""
    sequence, other = case.tokens[:1], case.random_tokens(1, "others")
    batch = sequence.repeat(N + 1, 1)
    for t in range(N):
        batch[t, t] = other[0, t] if other[0, t] != sequence[0, t] else case.tokens[1, t]
    out = case.outputs(batch)
    for t in range(1, N):
        case.same(out[t, :t], out[N, :t], f"outputs before token {t}, when it is changed")
    ignored = [t for t in range(N) if not torch.equal(batch[t], sequence[0]) and torch.equal(out[t, t:], out[N, t:])]
    case.true(not ignored, f"changing token {ignored[0] if ignored else 0} changes no output")


@law(4, "chunked", "one pass, a prefill with steps, and any chunks with the model's own cache agree")
@torch.no_grad()
def chunked(case: Foreign) -> str | None:
    """Decode the same tokens in several chunkings; then prefill and decode a batch padded on the left."""
    if case.cache is None:
        raise NotApplicable("it returns no cache that it also takes as an argument")
    tokens, want = case.tokens[:2], case.outputs(case.tokens[:2])
    for name, chunking in CHUNKINGS.items():
        case.same(_cached(case, tokens, chunking), want, name)
    if case.mask_covers is None:
        return "it takes no attention_mask with its cache: no padded batch was decoded"
    batch, mask, positions = _padded(case, LEFT)
    got = _cached(case, batch, (13,) + (1,) * (N - 13), mask, positions if case.positions else None)
    for r, length in enumerate(LENGTHS):
        alone = case.outputs(case.tokens[r : r + 1, :length])[0]
        real = min(length, N - 13)  # the real tokens among the decoded ones
        case.same(got[r, -real:], alone[-real:], f"row {r}, {N - length} padded on the left, a prefill, then steps")
    return None


def _cached(
    case: Foreign, tokens: Tensor, chunking: Sequence[int], mask: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """The outputs (batch, n, …) of tokens that are fed in chunks, with the model's cache."""
    cache, state, out, done = case.cache, None, [], 0
    assert cache is not None
    for length in chunking:
        how: dict[str, Any] = dict(cache.flags) | ({} if state is None else {cache.argument: state})
        if mask is not None:
            how["attention_mask"] = mask[:, 0 if case.mask_covers == "all" else done : done + length]
        if positions is not None:
            how["position_ids"] = positions[:, done : done + length]
        result = case.call(tokens[:, done : done + length], **how)
        state = cache.of(result)
        out.append(answer_of(result))
        done += length
    return torch.cat(out, 1)


@law(5, "padded", "neither padding (left or right), nor neighbors in a batch, nor packed documents change a token")
@torch.no_grad()
def padded(case: Foreign) -> str | None:
    """Compare each row alone with the same one among neighbors, padding and other documents."""
    tokens, untested = case.tokens, []
    alone = [case.outputs(tokens[r : r + 1, :length])[0] for r, length in enumerate(LENGTHS)]
    whole = case.outputs(tokens)
    for r, length in enumerate(LENGTHS):
        if length == N:
            case.same(whole[r], alone[r], f"row {r} among neighbors and alone")
    if case.masks:
        for side, batch in (("right", RIGHT), ("left", LEFT)):
            ids, mask, positions = _padded(case, batch)
            how = {"position_ids": positions} if batch is LEFT and case.positions else {}
            for r, real in enumerate(batch.split(case.outputs(ids, attention_mask=mask, **how))):
                case.same(real, alone[r], f"row {r}, {N - LENGTHS[r]} padded on the {side}, and alone")
    else:
        untested.append("it takes no attention_mask")
    if case.documents:
        positions = PACKED.join([torch.arange(length) for length in LENGTHS])
        how, names = {"position_ids": positions, **case.without_cache}, documented(case.model)
        more = {name: value for name, value in described(LENGTHS).items() if name in names}
        ways: dict[str, dict[str, Any]] = {"and alone": how}
        if more:
            ways[f"with {'seq_idx' if 'seq_idx' in more else 'cu_seq_lens'}"] = {**how, **more}
        for way, arguments in ways.items():
            packed = case.outputs(PACKED.join(rows_of(tokens, LENGTHS)), **arguments)
            for r, document in enumerate(PACKED.split(packed)):
                case.same(document, alone[r], f"document {r} packed {way}")
    else:
        untested.append("it does not separate packed documents")
    return "; ".join(untested)


@law(11, "compiled", "compiled equals eager")
@torch.no_grad()
def compiled(case: Foreign) -> None:
    """Run the graph that torch.compile captures, unchanged, in float32."""
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
    """Compare the derivative along one random direction through all weights."""
    if case.dtype != torch.float64 or case.tolerance > 1e-8:
        raise NotApplicable("it computes in float32, which is too imprecise for finite differences")
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    compare_derivatives(case, named, lambda: _scalar(case), case.seed)


def _scalar(case: Foreign, draw: int = 0, **how: Any) -> Tensor:
    """A scalar that depends on every output."""
    tokens = case.random_tokens(len(LENGTHS), f"draw {draw}") if draw else case.tokens
    out = case.outputs(tokens, **{**case.without_cache, **how})
    return (
        out * torch.randn(out.shape, generator=generator(case.seed, f"scalar {draw}"), dtype=out.dtype)
    ).sum() / out.numel() ** 0.5


@law(16, "every_weight", "each weight, and each expert, has a gradient")
def every_weight(case: Foreign) -> str | None:
    """Check on several inputs that each weight has a gradient. A gradient of rounding size is a note, not a failure."""
    how = _sources(case)
    named = {name: p for name, p in case.model.named_parameters() if p.requires_grad and p.numel()}
    nested = any(name.endswith("_config") and isinstance(value, dict) for name, value in case.config.items())
    unreached = _never_called(case) if nested else set()  # a config within a config: the model takes more than text
    expected = {name for name in named if not any(name.startswith(f"{module}.") for module in unreached)}
    used: dict[str, Tensor] = {}  # per weight, or per expert of a stacked weight: whether it has a gradient
    above_rounding: set[str] = set()
    for draw in range(DRAWS):
        computed = torch.autograd.grad(_scalar(case, draw, **how), list(named.values()), allow_unused=True)
        grads = {name: g for name, g in zip(named, computed, strict=True) if g is not None}
        scale = max(float(g.abs().max()) for g in grads.values())
        for name, g in grads.items():
            each = g.abs().flatten(1).amax(-1) if g.dim() == 3 else g.abs().amax()  # a stacked weight of experts
            used[name] = (each != 0) | used.get(name, torch.tensor(False))
            if bool((each > SILENT * scale).any()):
                above_rounding.add(name)
        if all(name in used and bool(used[name].all()) for name in expected):
            break
    unused = {name for name in expected if name not in used or not bool(used[name].all())}
    case.true(not unused, f"no gradient: {_listed(unused)}")
    notes = [f"not reached by tokens: {_listed(unreached)}"] if unreached else []
    rounding = expected - unused - above_rounding
    return "; ".join(notes + ([f"cancels out: {_listed(rounding)}"] if rounding else []))


def _sources(case: Foreign) -> dict[str, Any]:
    """A random encoder output for cross attention, where the model takes one."""
    widths = {p.shape[-1] for p in case.model.parameters() if p.dim() == 2 and p.shape[0] == case.vocab}
    for name, width in [(name, width) for name in SOURCES if name in case.arguments for width in sorted(widths)]:
        source = torch.randn(len(LENGTHS), 7, width, generator=generator(case.seed, name), dtype=case.dtype)
        with contextlib.suppress(Exception):
            case.outputs(case.tokens, **{name: source})
            return {name: source}
    return {}


@torch.no_grad()
def _never_called(case: Foreign) -> set[str]:
    """The outermost modules that a call with token ids does not reach: encoders of images or sound."""
    called: set[nn.Module] = set()
    handles = [m.register_forward_pre_hook(lambda m, args: called.add(m)) for m in case.model.modules()]
    case.outputs(case.tokens[:1])
    for handle in handles:
        handle.remove()
    idle = {name for name, m in case.model.named_modules() if name and not any(inner in called for inner in m.modules())}
    return {name for name in idle if not any(name.startswith(f"{outer}.") for outer in idle)}


def _listed(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _padded(case: Foreign, batch: Arrangement) -> tuple[Tensor, Tensor, Tensor]:
    """A padded batch of the rows: tokens, mask and positions, each (rows, n)."""
    rows = rows_of(case.tokens, LENGTHS)
    mask = batch.join([torch.ones_like(row) for row in rows], 0)
    return batch.join(rows, case.padding), mask, (mask.cumsum(-1) - 1).clamp(min=0)


def laws_on(case: Foreign, names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Test these laws, or all, on a model, by number."""
    for name in FOREIGN.names(names):
        yield FOREIGN.test(name, case)


def described(lengths: Sequence[int]) -> dict[str, Any]:
    """All arguments for documents of these lengths in one row."""
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    document = torch.cat([torch.full((length,), i, dtype=torch.int32) for i, length in enumerate(lengths)])[None]
    longest = max(lengths)
    return {
        "cu_seq_lens_q": begins,
        "cu_seq_lens_k": begins,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": document,
    }


def documented(model: nn.Module) -> frozenset[str]:
    """The names of these arguments that a model's forward documents."""
    forward = type(model).forward
    names = set(inspect.signature(forward).parameters)
    try:
        hints = typing.get_type_hints(forward, include_extras=True)
    except (NameError, TypeError):  # an annotation that cannot be evaluated here
        hints = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            for fields in typing.get_args(hints.get(name)):  # Unpack[TypedDict]
                names |= set(getattr(fields, "__annotations__", {}))
    return frozenset(names & set(described((1,))))
