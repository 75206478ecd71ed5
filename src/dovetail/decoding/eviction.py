"""Eviction: a KV cache of full attention held to a budget of entries per layer and sequence, so that its memory stays flat.

    oldest      the last `entries` tokens                                     a window
    sinks       the first `FIRST` tokens and a window                         Xiao et al. 2023 (StreamingLLM)
    attended    the newest half, and of the older tokens the most attended    Zhang et al. 2023 (H2O), state/attended.py

    model = evicting(model, Eviction("sinks", 1024))         the same weights; the masks and positions of the policy
    pool = Pool(model.part, …, **eviction.pool())            its KV caches

What stays of a prompt and of what follows is the same however they are cut into steps: token t sees what the policy leaves it,
itself included, also inside a prompt. `oldest` and `sinks` are therefore a spec of the same weights, with a window in its masks
and, for `sinks`, the position `streaming` around its own: all that holds of a spec holds of them.

Positions are those of the policy. Distances within a window are those of the sequence. With `sinks` the first tokens are never
farther away than the cache is long, and with `attended` positions count the entries of the cache; keys that would be rotated
when they are written are rotated when they are read. Positions that are added to embeddings stay those of the sequence.

Layers whose own window is within the budget, and recurrent states, need no eviction and stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses as dc
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from torch import nn

from dovetail.base.errors import InputError, SpecError
from dovetail.model.model import Model, ModelModule
from dovetail.nn.groups import Mask, Mixer, Position
from dovetail.nn.module import Module, make
from dovetail.nn.softmax import SoftmaxMixer
from dovetail.spec.check import check
from dovetail.spec.part import KINDS, Part, join, walk
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State

Policy = Literal["oldest", "attended", "sinks"]
FIRST = 4  # tokens that `sinks` keeps; more change little (Xiao et al. 2023, table 2)
ENTRIES = 1024
M = TypeVar("M", bound=ModelModule)
P = TypeVar("P", bound=Part)


@dc.dataclass(frozen=True)
class Eviction:
    """A policy, and the entries per layer and sequence that it leaves."""

    policy: Policy
    entries: int = ENTRIES

    def __post_init__(self) -> None:
        least = FIRST + 1 if self.policy == "sinks" else 2
        if self.entries < least:
            raise SpecError("evict_to", f"{self.entries} entries", f"{self.policy} takes {least} or more")

    @property
    def attended(self) -> int | None:
        """The entries of a pool whose layers evict the least attended one; None: they have windows."""
        return self.entries if self.policy == "attended" else None

    def check_options(self, **chosen: bool) -> None:
        """Raise InputError where an option is chosen that is not combined with the policy."""
        able = {"cache": ("oldest", "sinks"), "positions": ("oldest",)}
        for name, there in chosen.items():
            if there and self.policy not in able.get(name, ()):
                raise InputError(f"evict: {self.policy} is not combined with {name}; leave out one of the two")

    def pool(self) -> dict[str, Any]:
        """The options of a pool with this eviction."""
        return {"layout": "ring", "attended": self.attended}


def given_eviction(policy: Policy | None, entries: int | None) -> Eviction | None:
    """Return the eviction of these two options, if there is one."""
    if policy is None:
        if entries is not None:
            raise InputError("evict_to: is the budget of an eviction; choose one with evict, or leave it out")
        return None
    return Eviction(policy) if entries is None else Eviction(policy, entries)


def evicting(model: M, eviction: Eviction) -> M:
    """Return the model with the masks and positions of a policy. Its weights, adapters and quantized leaves are the same
    objects. Raises SpecError where a part's cache cannot be held to the budget."""
    if eviction.policy == "attended" and model.ranks.axes is not None:
        raise InputError("evict: the heads of a sharded model attend to different entries; use oldest or sinks")
    spec = evicting_spec(model.part, eviction)
    before = {path: part for path, part, _ in walk(model.part)}
    return _rebuilt(model, "", before, {path: (part, scope) for path, part, scope in walk(spec)})


def evicting_spec(spec: Model, eviction: Eviction) -> Model:
    """Return the spec of a model with the masks and positions of a policy."""
    for path, part, scope in walk(spec):
        if not scope.drafts and (why := part.whole_prefill(scope)) is not None:
            raise SpecError(path, f"nothing can be evicted, since {why}", "leave out evict")
    wide = {path for path, _, _, state in _caches(spec) if not _fits(state, eviction)}
    layers = tuple(_held(block, f"layers.{i}", wide, eviction) for i, block in enumerate(spec.layers))
    held = dc.replace(spec, layers=layers)
    try:
        check(held)
    except SpecError as error:
        what = f"cannot evict by `{eviction.policy}`: {error.problem}"
        raise SpecError(error.path, what, f"{error.remedy}; or use another policy") from error
    for path, part, scope, state in _caches(held):
        if eviction.attended is not None and not _fits(state, eviction):
            _check_attended(held, path, part, scope, state)
        elif not _fits(state, eviction):
            what = f"{part.kind} caches an entry of every {'token' if state.per == 'token' else 'block'}, whatever its mask"
            raise SpecError(path, what, "leave out evict, or swap the mixer")
    return held


def _caches(spec: Model) -> Iterator[tuple[str, Part, Scope, State]]:
    """The states that grow with the sequence."""
    for path, part, scope in walk(spec):
        if scope.decodes and not scope.drafts:
            yield from ((path, part, scope, state) for state in part.state(scope) if state.per in ("token", "block"))


def _fits(state: State, eviction: Eviction) -> bool:
    return state.per == "token" and state.window is not None and state.keep + state.window <= eviction.entries


def _held(part: P, path: str, wide: set[str], eviction: Eviction) -> P:
    """The part of a spec, and all below it, with the mask and the position of a policy at the paths in `wide`."""
    changes: dict[str, Any] = {}
    for name, below in part.parts().items():
        held = _held(below, f"{path}.{name}", wide, eviction)
        if held is not below:
            changes[name] = held
    if isinstance(part, Mixer) and path in wide:
        changes |= _of_policy(part, eviction)
    for name in [name for name in changes if "." in name]:  # an item of a tuple
        field, _, number = name.partition(".")
        items = list(changes.get(field, getattr(part, field)))
        items[int(number)] = changes.pop(name)
        changes[field] = tuple(items)
    return dc.replace(part, **changes) if changes else part


def _of_policy(mixer: Mixer, eviction: Eviction) -> dict[str, Part]:
    """The fields of a mixer that a policy changes."""
    fields, changes = {field.name: getattr(mixer, field.name) for field in dc.fields(mixer)}, dict[str, Part]()
    mask, position = fields.get("mask"), fields.get("position")
    if isinstance(mask, Mask) and eviction.policy != "attended":
        window: Any = KINDS["window"]
        first = FIRST if eviction.policy == "sinks" else 0
        changes["mask"] = mask & window(size=eviction.entries - first, keep=first)
    if isinstance(position, Position) and eviction.policy != "oldest":
        streaming: Any = KINDS["streaming"]
        read = _on_read(position)
        wraps = eviction.policy == "sinks" and position.site == "mixer" and not isinstance(position, streaming)
        changes["position"] = streaming(of=read) if wraps else read
    return changes


def _on_read(position: Position) -> Position:
    """The position, of which keys are rotated when they are read, if at all."""
    choice: Any = {"when": "read"} if "when" in {field.name for field in dc.fields(position)} else {}
    return dc.replace(position, **choice)


def _check_attended(spec: Model, path: str, part: Part, scope: Scope, state: State) -> None:
    """Raise SpecError unless the least attended entry of this cache can be evicted."""
    shared = any(other.same_as is not None for _, _, _, other in _caches(spec))
    remedy = "use evict oldest or sinks"
    if not (isinstance(part, SoftmaxMixer) and part.attends and state.per == "token" and state.copies == 2):
        raise SpecError(path, f"{part.kind} reads the entries of its KV cache itself, so their probs are not known", remedy)
    if "prefix" in part.needs():
        raise SpecError(f"{path}.prefix", "learned keys stand before all tokens, not in the cache", remedy)
    if shared:
        raise SpecError(path, "layers share a KV cache, and each attends to other entries", remedy)
    if part.visibility().flag() != "causal":
        raise SpecError(f"{path}.mask", f"attention is evicted from a causal mask, not from {part.visibility().kind}", remedy)


def _rebuilt(old: Any, path: str, before: Mapping[str, Part], after: Mapping[str, tuple[Part, Scope]]) -> Any:
    """A module of the old weights for the part at `path`, and the modules below it: the same object where nothing changed."""
    part, scope = after[path] if path in after and isinstance(old, Module) else (None, None)
    if isinstance(part, Mixer) and scope is not None and _changes(part, before[path]):
        return _adopting(make(part, scope), old)
    children = ((name, child) for name, child in old._modules.items() if child is not None)
    below = {name: _rebuilt(child, join(path, name), before, after) for name, child in children}
    if all(child is old._modules[name] for name, child in below.items()):
        return old
    new = copy.copy(old)
    new._modules = {**old._modules, **below}
    if part is not None:
        new.part = part
    return new


def _changes(part: Part, old: Part) -> bool:
    """Whether a policy has changed the mask or the position of a mixer."""
    names = {field.name for field in dc.fields(part)} & {"mask", "position"}
    return any(getattr(part, name) != getattr(old, name) for name in names)


def _adopting(new: nn.Module, old: nn.Module) -> nn.Module:
    """A mixer that was made for another mask and position, with the weights, the leaves and the mode of the old one."""
    new._parameters, new._buffers, new.training = old._parameters, old._buffers, old.training
    own = new._modules.get("position")
    new._modules = {**old._modules, "position": own} if own is not None else dict(old._modules)
    there = old._modules.get("position")
    if own is not None and there is not None:
        wrapped = own._modules.get("of") if "of" not in there._modules else own
        _share(own if wrapped is None else wrapped, there)
        own.train(old.training)
    return new


def _share(new: nn.Module, old: nn.Module) -> None:
    """Give a position, and those that it wraps, the tensors of another of the same kind."""
    new._parameters, new._buffers = old._parameters, old._buffers
    for name, child in old._modules.items():
        inner = new._modules.get(name)
        if child is not None and inner is not None:
            _share(inner, child)
