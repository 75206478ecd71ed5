"""Part: a frozen dataclass that declares everything about one piece of a model; the registry of kinds; spec <-> plain data.

    spec (a tree of parts)  --to_data-->  dict / YAML  --from_data-->  the same spec

A **kind** is a registered name (`rope`); a **group** is the abstract class it belongs to (`position`). A field that holds
another part names its default kind with `child("rope")`, which is looked up when an instance is constructed, so that parts
never import each other. `spec/field.py` says which values a field takes.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from dovetail.base.errors import SpecError, did_you_mean, names_or_nearest
from dovetail.base.keywords import checks_keywords
from dovetail.base.value import options
from dovetail.spec.field import describe, finite, fits
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Read, State, Weight

if typing.TYPE_CHECKING:
    from torch import Tensor

KINDS: dict[str, type[Part]] = {}
SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")  # of the layers that a pattern names: 1::2, :-1
P = TypeVar("P", bound="type[Part]")
T = TypeVar("T")


@dc.dataclass(frozen=True)
class Problem:
    """An error or a piece of advice about a part: the field, what is wrong, what to do."""

    field: str
    problem: str
    remedy: str = ""


def broken(*rules: tuple[object, str, str, str]) -> list[Problem]:
    """The problems of those rules that are broken: (what is true then, the field, what is wrong, what to do) each."""
    return [Problem(*problem) for is_broken, *problem in rules if is_broken]


def child(kind: str, **fields: Any) -> Any:
    """A dataclass field whose default is a part of this kind."""
    return dc.field(default_factory=lambda: KINDS[kind](**fields))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dc.field, child))
def register(kind: str) -> Callable[[P], P]:
    """Make the class a frozen dataclass that specs can name by `kind`."""

    def decorate(cls: P) -> P:
        if "__repr__" not in cls.__dict__:  # not that of a base, which knows the fields of the base alone
            cls.__repr__ = Part.__repr__  # type: ignore[method-assign]
        part = checks_keywords(dc.dataclass(frozen=True, kw_only=True, repr=False)(cls))
        if kind in KINDS and KINDS[kind].__module__ != cls.__module__:
            raise SpecError("", f"the kind {kind!r} is registered twice: in {KINDS[kind].__module__} and {cls.__module__}")
        part.kind = kind
        KINDS[kind] = part
        return part

    return decorate


@dc.dataclass(frozen=True, kw_only=True)
class Part:
    """The base of every part. Each method is a declaration with a neutral default; a part overrides those that apply."""

    kind: ClassVar[str] = ""
    group: ClassVar[str] = ""
    TAPS: ClassVar[Mapping[str, str]] = {}  # name -> axes behind those of the batch, see `taps`
    proof: ClassVar[Proof] = Proof()  # what laws, verify, diff and surgery ask of it: `class RopeProof(Proof, of=Rope)`
    # the class that computes this part, which declares it: `class RopeModule(PositionModule, of=Rope)`; None for a part without
    # a module (a mask, an activation)
    module: ClassVar[type[Any] | None] = None
    # whether this is a tensor-parallel region: it takes a whole input and returns a partial sum on each rank
    tp_region: ClassVar[bool] = False
    # axes of an ancestor (`vocab`) along which tensor parallelism shards weights of this part. The part is then no region: it
    # calls `ctx.ranks` itself, around what it computes with those weights
    tp_axes: ClassVar[tuple[str, ...]] = ()
    # axes over which this part sums or takes means, with or without a weight of its own (a norm): all their entries must be on
    # one rank
    reduces: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            value = getattr(self, name)
            if not fits(value, hint):
                raise SpecError(name, f"{value!r} is not {describe(hint)}")
            if not finite(value):
                raise SpecError(name, f"{value!r} is not finite", "give a finite number")

    def __repr__(self) -> str:
        """The class and the fields that differ from their default: `Attention(heads=8, mask=Window(size=64))`."""
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self.changed())})"

    @functools.cached_property
    def key(self) -> str:
        """A string that is equal for equal parts and no others: a key for what is computed once per step."""
        return repr(self.to_data())

    # -- the module tree
    def children(self) -> dict[str, Part]:
        """Children in the module tree, by name; by default the fields that hold parts with modules."""
        return {name: part for name, part in self.parts().items() if part.module is not None}

    def axes(self, scope: Scope) -> Scope:
        """The scope of this part itself: the sizes it defines."""
        return scope

    def child_scope(self, scope: Scope, child: str) -> Scope:
        """The scope a child of this part sees."""
        return scope

    # -- declarations
    def weights(self, scope: Scope) -> list[Weight]:
        """Declared weights and constants."""
        return []

    def constant(self, name: str, scope: Scope) -> Tensor:
        """The value of a constant, or the initial value of a weight whose init is `const`."""
        raise NotImplementedError(f"{self.kind} declares no constant {name!r}")

    def state(self, scope: Scope) -> list[State]:
        """Declared decode state: KV caches, recurrent states."""
        return []

    def reads(self, scope: Scope) -> list[Read]:
        """Values of earlier layers, or of the model, that a branch of a block reads."""
        return []

    def publishes(self) -> dict[str, tuple[str, ...]]:
        """Values that branches of later blocks may read: name -> axes behind (…, n)."""
        return {}

    def needs(self) -> frozenset[str]:
        """Features an attention kernel must offer."""
        return frozenset()

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        """Activation × activation FLOPs over n tokens: (all pairs, as the reference computes them; pairs the mask leaves)."""
        return 0, 0

    def check(self, scope: Scope) -> list[Problem]:
        """Errors that make the part impossible to build. The bounds of its fields are checked before."""
        return []

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        """Advice for sequences of `length` tokens; never an error."""
        return []

    def taps(self, scope: Scope) -> Mapping[str, str]:
        """The activations that listeners can read and replace: name -> its axes behind those of the batch. `pos` and `query`
        are the tokens of a call, `key` all tokens so far; an activation with none of them is of the last token."""
        return self.TAPS

    def whole_prefill(self, scope: Scope) -> str | None:
        """Why a prompt must be computed at once, in whole; None: it may be computed in chunks (chunked prefill)."""
        return None

    # -- the spec tree
    def parts(self) -> dict[str, Part]:
        """The parts in the fields, by field name; those of a tuple as `name.0`, `name.1`, …"""
        parts: dict[str, Part] = {}
        for field in dc.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Part):
                parts[field.name] = value
            elif isinstance(value, tuple):
                parts |= {f"{field.name}.{i}": item for i, item in enumerate(value) if isinstance(item, Part)}
        return parts

    @classmethod
    def from_short_form(cls, data: Any) -> Any:
        """The data that a short form in YAML stands for, per group: by default a bare string names a kind."""
        return {"kind": data} if isinstance(data, str) else data

    def to_data(self) -> Any:
        """Plain data: the kind and the fields that differ from their default; the kind alone where none does."""
        data = {"kind": self.kind, **self.changed()}
        return self.kind if len(data) == 1 else data

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their default, as plain data."""
        return {f.name: plain(getattr(self, f.name)) for f in dc.fields(self) if getattr(self, f.name) != default_of(f)}

    def replace(self, pattern: str, value: Any) -> Self:
        """A copy in which every field whose path matches the glob is `value` (or value(old)). A glob matches name by name,
        `layers.*.mixer.kv_heads`; layers may be a slice, `layers.1::2.mixer`. A value of the wrong type raises SpecError."""
        new: Callable[[Any], Any] = value if callable(value) and not isinstance(value, Part) else lambda _: value
        return self.rewrite(pattern, lambda place: new(place.old))

    def set(self, pattern: str, data: Any) -> Self:
        """`replace` with plain data, read by the declared type of each field: `set("…mixer.position", "alibi")`."""
        return self.rewrite(pattern, lambda place: _read(data, place.hint, place.path, place.default_kind))

    def rewrite(self, pattern: str, new: Callable[[FieldMatch], Any]) -> Self:
        """`replace` with a value that `new` computes from the place of each field that matches."""
        hits: list[str] = []
        spec = _rewrite(self, type(self), pattern.split("."), new, hits, "")
        if not hits:
            raise _no_match(self, pattern)
        return spec


@dc.dataclass(frozen=True)
class FieldMatch:
    """A field that a pattern matches: its path, its value, its declared type, and its default kind."""

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
    """The default of a field, constructed if it is a factory."""
    if field.default_factory is not dc.MISSING:
        return field.default_factory()
    return field.default


def _no_match(part: Part, pattern: str) -> SpecError:
    """Return the error of a pattern that matches no field; it names the first name without a match and the nearest fields."""
    here, names = [part], pattern.split(".")
    for i, name in enumerate(names):
        fields = sorted({field for inside in here for field, _ in _values(inside)})
        matches = [value for inside in here for field, value in _values(inside) if _matches(field, name, inside)]
        if not matches:
            where = f" of {'.'.join(names[:i])}" if i else ""
            remedy = did_you_mean(name, fields) or f"its fields are {', '.join(fields) or 'none'}"
            return SpecError(pattern, f"no field{where} matches {name!r}", remedy)
        here = [value for value in matches if isinstance(value, (Part, tuple))]
        if not here:
            return SpecError(
                pattern, f"{'.'.join(names[: i + 1])} holds no part, so it has no field {'.'.join(names[i + 1 :])}"
            )
    return SpecError(pattern, "no field of this spec matches")


def _values(inside: Part | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the fields of a part, or of the items of a tuple by their numbers."""
    if isinstance(inside, tuple):
        yield from ((str(i), item) for i, item in enumerate(inside))
    else:
        yield from ((field.name, getattr(inside, field.name)) for field in dc.fields(inside))


def _rewrite(inside: Any, hint: Any, pattern: list[str], new: Callable[[FieldMatch], Any], hits: list[str], path: str) -> Any:
    """A part, or a tuple of the type `hint`, with new values where the pattern matches."""
    items, rest = isinstance(inside, tuple), pattern[1:]
    hints = {} if items else field_types(type(inside))
    changes: dict[str, Any] = {}
    for name, old in _values(inside):
        if not _matches(name, pattern[0], inside):
            continue
        here, type_ = join(path, name), (*typing.get_args(hint), Part)[0] if items else hints[name]
        if not rest:
            hits.append(here)
            item_kind = old.kind if isinstance(old, Part) else None
            kind = item_kind if items else _default_kind(inside.__dataclass_fields__[name])
            changes[name] = new(FieldMatch(here, old, type_, kind))
        elif isinstance(old, (Part, tuple)):
            changes[name] = _rewrite(old, type_, rest, new, hits, here)
    if items:
        return tuple(changes.get(name, old) for name, old in _values(inside))
    return at_path(path, lambda: dc.replace(inside, **changes)) if changes else inside


def _matches(name: str, pattern: str, inside: Any) -> bool:
    """Whether a name matches a glob; or the number of an item of a tuple is in a slice, `1::2`."""
    if not isinstance(inside, tuple) or not (parts := SLICE.fullmatch(pattern)):
        return fnmatchcase(name, pattern)
    start, stop, step = (int(part) if part else None for part in parts.groups())
    return step != 0 and int(name) in range(len(inside))[start:stop:step]


def at_path(path: str, construct: Callable[[], T]) -> T:
    """Return construct(); put the path of the part before the field that a SpecError names."""
    try:
        return construct()
    except SpecError as error:
        raise SpecError(join(path, error.path), error.problem, error.remedy) from error


def walk(part: Part, scope: Scope | None = None, path: str = "") -> Iterator[tuple[str, Part, Scope]]:
    """(path, part, its scope) over the module tree, parents first."""
    scope = part.axes((scope or Scope()).at_path(path))
    yield path, part, scope
    for name, below in part.children().items():
        yield from walk(below, part.child_scope(scope, name), f"{path}.{name}".lstrip("."))


def weights_of(part: Part, scope: Scope) -> list[Weight]:
    """The weights and constants that a part declares. In a layer that uses the weights of another layer, each is tied to the
    one at the same path there; constants follow from the spec and are its own."""
    weights = part.weights(scope)
    if scope.shares is None:
        return weights
    there = scope.in_layer(scope.shares)
    return [w if w.role == "const" or w.same_as else dc.replace(w, same_as=join(there, w.name)) for w in weights]


def walk_spec(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """(path, part) over the spec tree, parents first, parts without a module included."""
    yield path, part
    for name, below in part.parts().items():
        yield from walk_spec(below, f"{path}.{name}".lstrip("."))


# -- plain data -> spec ---------------------------------------------------------------------------------------------


def from_data(data: Any, group: type[Part], path: str = "", default: str | None = None) -> Any:
    """Read a part of the group from plain data. An unknown key or kind and a value of the wrong type raise SpecError with the
    path; `default` is the kind where the data names none."""
    data = at_path(path, lambda: group.from_short_form(data))
    if not isinstance(data, Mapping):
        raise SpecError(path, f"expected a {group.group or 'part'}, got {data!r}", "give the name of a kind, or a mapping")
    fields = dict(data)
    kind = fields.pop("kind", default)
    if not isinstance(kind, str) or kind not in KINDS:
        problem = f"no part is called {kind!r}" if kind else "no kind is given"
        raise SpecError(path, problem, names_or_nearest(str(kind), _kinds_of(group), "kinds"))
    cls = KINDS[kind]
    if not issubclass(cls, group):
        wanted = group.group if cls.group != group.group else f"{group.__name__.lower()} {group.group}"
        raise SpecError(path, f"{kind} is a {cls.group}, not a {wanted}", f"kinds: {', '.join(_kinds_of(group))}")
    hints, known = field_types(cls), {f.name: f for f in dc.fields(cls)}
    for name in fields:
        if name not in known:
            remedy = _of_a_child(str(name), known.values()) or names_or_nearest(str(name), known, "fields")
            raise SpecError(join(path, str(name)), f"{kind} has no such field", remedy)
    read = {name: _read(value, hints[name], join(path, name), _default_kind(known[name])) for name, value in fields.items()}
    return at_path(path, lambda: cls(**read))


def join(path: str, name: str) -> str:
    """`a.b` from `a` and `b`; `b` at the root, `a` where there is no name."""
    return f"{path}.{name}" if path and name else path or name


@functools.cache
def field_types(cls: type[Part]) -> dict[str, Any]:
    """The declared type of each field, resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dc.fields(cls)}


def _kinds_of(group: type[Part]) -> list[str]:
    return sorted(kind for kind, cls in KINDS.items() if issubclass(cls, group))


def _read(value: Any, hint: Any, path: str, default_kind: str | None) -> Any:
    """Convert plain data to a value of the declared type."""
    if value is None and type(None) in options(hint):
        return None
    for option in options(hint):
        if isinstance(option, type) and issubclass(option, Part):
            return from_data(value, option, path, default_kind)
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            item_type = typing.get_args(option)[0]
            return tuple(_read(item, item_type, join(path, str(i)), None) for i, item in enumerate(value))
        if fits(value, option):
            if not finite(value):
                raise SpecError(path, f"{value!r} is not finite", "give a finite number")
            return float(typing.cast(float, value)) if option is float else value
    raise SpecError(path, f"{value!r} is not {describe(hint)}")


@functools.cache
def _of_a_child(name: str, fields: Iterable[dc.Field[Any]]) -> str:
    """Say which field holds a part with this field by default, if one does."""
    for field in fields:
        child = KINDS.get(_default_kind(field) or "")
        if child is not None and name in {below.name for below in dc.fields(child)}:
            return f"it is a field of {field.name}: write {field.name}: {{{name}: …}}"
    return ""


def _default_kind(field: dc.Field[Any]) -> str | None:
    default = default_of(field)
    return default.kind if isinstance(default, Part) else None
