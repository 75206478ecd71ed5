"""Part: a frozen dataclass that answers a few questions with plain data; the registry of kinds; spec <-> plain data.

    spec (a tree of parts)  --to_data-->  dict / YAML  --from_data-->  the same spec

A **kind** is a registered name (`rope`); a **group** is the abstract class it belongs to (position). A field that holds
another part names the kind it defaults to with `child("rope")`, looked up when an instance is made: parts never import
each other.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from dovetail.core.errors import SpecError
from dovetail.core.scope import Scope
from dovetail.core.weight import State, Weight

if typing.TYPE_CHECKING:
    from torch import Tensor

    from dovetail.core.module import Module

KINDS: dict[str, type[Part]] = {}
P = TypeVar("P", bound="type[Part]")


@dc.dataclass(frozen=True)
class Problem:
    """One thing wrong (or unwise) with a part: the field, what is the matter, what to do."""

    field: str
    problem: str
    remedy: str = ""


def child(kind: str, **fields: Any) -> Any:
    """A dataclass field that holds a part of this kind unless told otherwise."""
    return dc.field(default_factory=lambda: KINDS[kind](**fields))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dc.field, child))
def register(kind: str) -> Callable[[P], P]:
    """Make the class a frozen dataclass that specs can name by `kind`."""

    def decorate(cls: P) -> P:
        made = dc.dataclass(frozen=True, kw_only=True)(cls)
        if kind in KINDS and KINDS[kind].__module__ != cls.__module__:
            raise SpecError("", f"two parts are called {kind!r}: in {KINDS[kind].__module__} and {cls.__module__}")
        made.kind = kind
        KINDS[kind] = made
        return made

    return decorate


@dc.dataclass(frozen=True, kw_only=True)
class Part:
    """The questions every part answers; the defaults are neutral, so a part overrides only what concerns it."""

    kind: ClassVar[str] = ""
    group: ClassVar[str] = ""
    TAPS: ClassVar[tuple[str, ...]] = ()
    training_only: ClassVar[frozenset[str]] = frozenset({"dropout"})  # fields that change nothing outside training

    @functools.cached_property
    def key(self) -> str:
        """One text for all equal parts: what is computed once a step is filed under it."""
        return repr(self)

    # -- the module tree
    def module(self) -> type[Module] | None:
        """The class that computes this part; None for a part that needs no module (a mask, an activation)."""
        return None

    def children(self) -> dict[str, Part]:
        """Children in the module tree, by name; by default the fields that hold parts with modules."""
        return {name: part for name, part in self.parts().items() if part.module() is not None}

    def axes(self, scope: Scope) -> Scope:
        """The scope of this part itself: the sizes it defines."""
        return scope

    def child_scope(self, scope: Scope, child: str) -> Scope:
        """The scope a child of this part sees."""
        return scope

    # -- the answers
    def weights(self, scope: Scope) -> list[Weight]:
        """Declared weights and constants."""
        return []

    def constant(self, name: str, scope: Scope) -> Tensor:
        """The value of a constant, or of a weight whose init is `const`."""
        raise NotImplementedError(f"{self.kind} declares no constant {name!r}")

    def state(self, scope: Scope) -> list[State]:
        """What it remembers while decoding."""
        return []

    def needs(self) -> frozenset[str]:
        """What it asks of a kernel."""
        return frozenset()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        """Activation × activation FLOPs over n tokens: (as the readable path computes them, as the mask lets through)."""
        return 0, 0

    def check(self, scope: Scope) -> list[Problem]:
        """Why this cannot be built."""
        return []

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        """What a friend would say about it, for sequences of `length`; never stops anyone."""
        return []

    def tp_region(self) -> bool:
        """Under tensor parallel: takes a whole input and gives a sum that is still partial on each rank."""
        return False

    def taps(self) -> tuple[str, ...]:
        """Names of the activations it lets others see and replace."""
        return self.TAPS

    def acts_on(self, field: str) -> tuple[str, ...] | None:
        """Names of the weights (`q` for `q.weight`) and children whose outputs this field acts on: another value reinterprets
        those and no others. None: every weight of this part."""
        return None

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        """Two to four small legal values for each plain field, for the laws to try. Fields that hold parts are tried
        with every registered kind of their group."""
        return {}

    def idle(self, scope: Scope) -> frozenset[str]:
        """Fields that mean nothing at this very place (a shared table in the layer that holds it)."""
        return frozenset()

    def excepts(self, scope: Scope) -> dict[str, str]:
        """Laws that cannot hold for this very spec, with the reason."""
        return {}

    # -- the spec tree
    def parts(self) -> dict[str, Part]:
        """The parts held in fields, by field name; those of a tuple as `name.0`, `name.1`, …"""
        found: dict[str, Part] = {}
        for field in dc.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Part):
                found[field.name] = value
            elif isinstance(value, tuple):
                found |= {f"{field.name}.{i}": item for i, item in enumerate(value) if isinstance(item, Part)}
        return found

    @classmethod
    def sugar(cls, data: Any) -> Any:
        """Short forms in YAML, per group: by default a bare string names a kind."""
        return {"kind": data} if isinstance(data, str) else data

    def to_data(self) -> Any:
        """Plain data with the fields that differ from their default; a bare string where none does."""
        data = {"kind": self.kind, **self.changed()}
        return self.kind if len(data) == 1 else data

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their default, as plain data."""
        return {f.name: plain(getattr(self, f.name)) for f in dc.fields(self) if getattr(self, f.name) != default_of(f)}

    def replace(self, pattern: str, value: Any) -> Self:
        """A copy with every field whose path matches the glob set to `value` (or to value(old)). Paths are component by
        component: `layers.*.mixer.kv_heads`."""
        new: Callable[[Any], Any] = value if callable(value) and not isinstance(value, Part) else lambda _: value
        return self._rewrite(pattern, lambda place: new(place.old))

    def set(self, pattern: str, data: Any) -> Self:
        """The same with plain data, read as each field's declared type asks."""
        return self._rewrite(pattern, lambda place: _read(data, place.hint, place.path, place.default_kind))

    def _rewrite(self, pattern: str, make: Callable[[Place], Any]) -> Self:
        hits: list[str] = []
        new = _rewrite(self, pattern.split("."), make, hits, "")
        if not hits:
            names = ", ".join(f.name for f in dc.fields(self))
            raise SpecError(pattern, "no field of this spec matches", f"its fields are {names}")
        return new


@dc.dataclass(frozen=True)
class Place:
    """A field found by a pattern: its path, old value, declared type, and the kind it defaults to."""

    path: str
    old: Any
    hint: Any
    default_kind: str | None


def plain(value: Any) -> Any:
    """A field's value as plain data."""
    if isinstance(value, Part):
        return value.to_data()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def default_of(field: dc.Field[Any]) -> Any:
    """A field's default, made if it is a factory."""
    if field.default_factory is not dc.MISSING:
        return field.default_factory()
    return field.default


def _rewrite(part: Any, pattern: list[str], make: Callable[[Place], Any], hits: list[str], path: str) -> Any:
    head, rest = pattern[0], pattern[1:]
    changes: dict[str, Any] = {}
    hints = field_types(type(part))
    for field in dc.fields(part):
        old, here = getattr(part, field.name), join(path, field.name)
        if not fnmatchcase(field.name, head):
            continue
        if not rest:
            hits.append(here)
            changes[field.name] = make(Place(here, old, hints[field.name], _default_kind(field)))
        elif isinstance(old, Part):
            changes[field.name] = _rewrite(old, rest, make, hits, here)
        elif isinstance(old, tuple):
            item_type = (*typing.get_args(hints[field.name]), Part)[0]
            changes[field.name] = tuple(_rewrite_item(i, item, item_type, rest, make, hits, here) for i, item in enumerate(old))
    return dc.replace(part, **changes) if changes else part


def _rewrite_item(
    index: int, item: Any, hint: Any, pattern: list[str], make: Callable[[Place], Any], hits: list[str], path: str
) -> Any:
    here = join(path, str(index))
    if not fnmatchcase(str(index), pattern[0]):
        return item
    if len(pattern) == 1:
        hits.append(here)
        return make(Place(here, item, hint, item.kind if isinstance(item, Part) else None))
    return _rewrite(item, pattern[1:], make, hits, here) if isinstance(item, Part) else item


def walk(part: Part, scope: Scope | None = None, path: str = "") -> Iterator[tuple[str, Part, Scope]]:
    """(path, part, its scope) over the module tree, parents first."""
    scope = part.axes((scope or Scope()).at_path(path))
    yield path, part, scope
    for name, below in part.children().items():
        yield from walk(below, part.child_scope(scope, name), f"{path}.{name}".lstrip("."))


def walk_spec(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """(path, part) over the spec tree: also parts without a module, each written field once."""
    yield path, part
    for name, below in part.parts().items():
        yield from walk_spec(below, f"{path}.{name}".lstrip("."))


# -- plain data -> spec ---------------------------------------------------------------------------------------------


def from_data(data: Any, group: type[Part], path: str = "", default: str | None = None) -> Any:
    """Read a part of the group from plain data; every unknown key, kind or ill-typed value is an error with its path."""
    data = group.sugar(data)
    if not isinstance(data, Mapping):
        raise SpecError(path, f"expected a {group.group or 'part'}, got {data!r}", "write a kind's name or a mapping")
    fields = dict(data)
    kind = fields.pop("kind", default)
    if not isinstance(kind, str) or kind not in KINDS:
        raise SpecError(path, f"no part is called {kind!r}" if kind else "no kind is given", f"kinds: {_kinds_of(group)}")
    cls = KINDS[kind]
    if not issubclass(cls, group):
        raise SpecError(path, f"{kind} is a {cls.group}, not a {group.group}", f"kinds: {_kinds_of(group)}")
    hints, known = field_types(cls), {f.name: f for f in dc.fields(cls)}
    for name in fields:
        if name not in known:
            raise SpecError(join(path, str(name)), f"{kind} has no such field", f"fields: {', '.join(known) or 'none'}")
    read = {name: _read(value, hints[name], join(path, name), _default_kind(known[name])) for name, value in fields.items()}
    return cls(**read)


def join(path: str, name: str) -> str:
    """`a.b` from `a` and `b`; `b` at the root."""
    return f"{path}.{name}" if path else name


@functools.cache
def field_types(cls: type[Part]) -> dict[str, Any]:
    """The declared type of each field, resolved."""
    return typing.get_type_hints(cls)


def _kinds_of(group: type[Part]) -> str:
    return ", ".join(sorted(kind for kind, cls in KINDS.items() if issubclass(cls, group)))


def _read(value: Any, hint: Any, path: str, default_kind: str | None) -> Any:
    """One field's value, held to its declared type."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is typing.Literal and value in args:
            return value
        if isinstance(option, type) and issubclass(option, Part):
            return from_data(value, option, path, default_kind)
        if origin is tuple and isinstance(value, (list, tuple)):
            if isinstance(args[0], type) and issubclass(args[0], Part):
                return tuple(from_data(item, args[0], join(path, str(i))) for i, item in enumerate(value))
            return tuple(_read(item, args[0], join(path, str(i)), None) for i, item in enumerate(value))
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise SpecError(path, f"{value!r} is not {_say(options)}")


def _default_kind(field: dc.Field[Any]) -> str | None:
    default = default_of(field)
    return default.kind if isinstance(default, Part) else None


def _say(options: tuple[Any, ...]) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return " or ".join(words.get(option) or _say_one(option) for option in options)


def _say_one(option: Any) -> str:
    if typing.get_origin(option) is tuple:
        item = typing.get_args(option)[0]
        return "a list of " + (item.group + "s" if issubclass(item, Part) else "numbers" if item in (int, float) else "texts")
    return f"one of {', '.join(map(str, typing.get_args(option)))}"
