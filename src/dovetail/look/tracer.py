"""Tracer: the listener behind every trace and patch; and `trace`, one forward pass with it.

    trace(model, tokens, "*.mixer.pattern")                         {"layers.0.mixer.pattern": (batch, heads, n, n), …}
    trace(model, tokens, "head.logits", patch={"layers.3.mixer_add": 0.0})         logits without the attention of layer 3

A pattern that is only read does not change the kernel that computes the output: its rows are computed beside it, for the
queries that are asked for (`Listener.edits`). Patches come before records, so that a trace holds the replaced values.
"""

from __future__ import annotations

import dataclasses as dc
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.look.address import TOKENS, Target, resolve, resolve_each
from dovetail.look.intervention import Replacement, applied
from dovetail.look.record import Trace, joined
from dovetail.look.site import NOTHING, Site
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.inputs import default_ctx
from dovetail.nn.layout import TokenLayout
from dovetail.spec.part import Part


class Tracer(Listener):
    """Records the slices of activations that a Trace names, and replaces those of a patch."""

    def __init__(
        self, spec: Part, trace: Trace | None = None, patch: Mapping[str, Replacement] | None = None, grad: bool = False
    ) -> None:
        super().__init__({})
        self.trace, self.grad = Trace() if trace is None else trace, grad
        self.records: dict[str, list[Target]] = defaultdict(list)
        self.patches: dict[str, list[tuple[Target, Replacement]]] = defaultdict(list)
        self.unused: set[str] = set()
        self.left: dict[str, set[tuple[str, int]]] = {}  # numbers that a slice lists, and the run has not come to
        self.choices: dict[str, str] = {}  # the address of the chosen experts, by that of what is asked for by expert
        for target in resolve(spec, self.trace.patterns):
            self.records[target.address].append(target)
            self._expect(target)
        if not isinstance(patch, Mapping | None):
            raise InputError(f"patch: {type(patch).__name__} is not a mapping of addresses to replacements")
        for replacement, targets in zip((patch or {}).values(), resolve_each(spec, patch or ()), strict=True):
            self.patch(targets, replacement)
        self.chosen: dict[str, Tensor] = {}
        self.ends: dict[bool, Tensor] = {}  # of the encoder, of the decoder: the tokens of each row
        self.pieces: dict[str, tuple[Target, list[Tensor]]] = {}

    def patch(self, targets: Sequence[Target], replacement: Replacement) -> None:
        """Replace the activations at these targets as well."""
        for target in targets:
            self.patches[target.address].append((target, replacement))
            self._expect(target)

    def _expect(self, target: Target) -> None:
        """Require that the run has the slice; listen to the chosen experts where an activation per choice is asked for by
        expert."""
        self.unused.add(target.given().key)
        if target.choices:
            self.choices[target.address] = target.choices

    def _reached(self, site: Site, x: Tensor, key: str) -> None:
        """The run has the slice `key`, which is that of the site."""
        self.unused.discard(key)
        if several := site.several():
            left = self.left.setdefault(key, set(several))
            left -= {(axis, number) for axis, number in left if site.has(x, axis, number)}

    def wants(self, address: str) -> bool:
        return address in self.records or address in self.patches or address in self.choices.values()

    def edits(self, address: str) -> bool:
        return self.grad or address in self.patches

    def queries(self, address: str, layout: TokenLayout) -> Tensor | None:
        """Which queries (rows, n) of a pattern are recorded; None: all."""
        targets = self.records.get(address, ())
        if layout.order.dim() != 2 or any("query" not in target.picks for target in targets):
            return None
        self._begin(address, layout)
        wanted = torch.zeros_like(layout.order, dtype=torch.bool)
        for target in targets:
            site = self._site(target, layout)
            if site.at_step():
                wanted |= site.queries()
        return wanted

    def _begin(self, address: str, layout: TokenLayout) -> None:
        of_encoder = address.startswith("encoder.")
        if of_encoder not in self.ends:
            order = torch.where(layout.real, layout.order, -1)
            self.ends[of_encoder] = order.amax(-1) + 1 if order.dim() == 2 else order.new_zeros(1)

    def _site(self, target: Target, layout: TokenLayout) -> Site:
        ends = self.ends[target.address.startswith("encoder.")]
        return Site(target, layout, self.step, ends, self.chosen.get(self.choices.get(target.address, "")))

    def hear(self, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        assert layout is not None
        if not self.wants(address):
            return x
        self._begin(address, layout)
        if address in self.choices.values():
            self.chosen[address] = x
        if address in self.patches:
            x = self._patched(address, x, layout)
        if self.grad and address in self.records and x.requires_grad:
            x = x.view_as(x)  # the gradient at a tap is that of what comes after it, also where the tensor is used elsewhere
            x.retain_grad()
        for target in self.records.get(address, ()):
            site = self._site(target, layout)
            if site.at_step() and (part := site.take(x)) is not None:
                self._reached(site, x, target.key)
                kept = part if self.grad else part.detach().clone()
                self.pieces.setdefault(target.key, (target, []))[1].append(kept)
        return x

    def _patched(self, address: str, x: Tensor, layout: TokenLayout) -> Tensor:
        """x with the patches of this address. Those of some rows are written into one copy of x."""
        copied = False
        for target, replacement in self.patches[address]:
            site = self._site(target, layout)
            if not site.at_step():
                continue
            site = site.within(x)
            part = x if site.rows is None else x[site.rows]
            mask = site.mask(part)
            if mask is not None and not bool(mask.any()):
                continue
            self._reached(site, part, target.key)
            new = applied(replacement, part, site, mask)
            if site.rows is None:
                x, copied = new, False
            else:
                x, copied = (x if copied else x.clone()), True
                x[site.rows] = new
        return x

    def end(self) -> Trace:
        """Fill the trace; raise InputError for a patch, or a slice, that no call of the model had a value for."""
        for key, (target, pieces) in self.pieces.items():
            self.trace[key] = joined(pieces, remaining_axes(target))
        self.pieces = {}
        if self.unused:
            several = f" and {len(self.unused) - 1} more" if len(self.unused) > 1 else ""
            raise InputError(f"{min(self.unused)}{several}: {NOTHING}")
        if left := [f"{key}: {axis}={number}" for key, each in self.left.items() for axis, number in sorted(each)]:
            raise InputError(f"{left[0]}: {NOTHING}")
        return self.trace


def remaining_axes(target: Target) -> tuple[str, ...]:
    """The axes of a slice: those that a single index does not drop."""
    dropped = {axis for axis, pick in target.picks.items() if isinstance(pick, int) and axis not in TOKENS}
    return tuple(axis for axis in target.axes if axis not in dropped)


def trace(
    model: ModelModule,
    tokens: Tensor,
    *patterns: str,
    ctx: Ctx | None = None,
    grad: bool = False,
    patch: Mapping[str, Replacement] | None = None,
) -> Trace:
    """Return the activations whose addresses match one of the patterns, in the order in which they are computed.

    tokens (batch, n), or another input of the embedding. `ctx` holds the token layout (and the encoder output) of an input that
    is not a batch of whole sequences. With `grad` the activations are part of the graph and keep their gradients: after
    `activations["head.logits"].sum().backward()` each has a `.grad`. `patch` replaces activations: address pattern -> an
    intervention (`look/intervention.py`); the trace then holds the replaced value.
    """
    tracer = Tracer(model.part, Trace(*patterns), patch, grad)
    with torch.set_grad_enabled(grad):
        listened(model, tokens, tracer, ctx)
    return tracer.end()


def listened(model: ModelModule, tokens: Tensor, tracer: Listener, ctx: Ctx | None = None) -> Tensor:
    """Return the output of a forward pass with a listener, such as a tracer."""
    ctx = ctx or default_ctx(tokens, ranks=model.ranks)
    with torch.compiler.set_stance("force_eager"):  # a listener would recompile a compiled model
        return model(tokens, dc.replace(ctx, taps=tracer))
