"""Fields of a config: each reads some config fields as settings of our spec, and writes them from a spec.

    Copy          the same value at one or several paths of ours
    Nullable      Copy, where null is a value of its own
    Choice        a word that names a kind of part
    Switch        true or false, for one of two values of ours
    Transform     a number in another form, such as its inverse
    Implied       a value that other config fields fix
    LegacyFixed   a field of older files with one supported value

A path pattern addresses values of a spec: `head.tied`, `layers.3.mixer`, `layers.*.norm.eps` (every layer that has it),
`layers.*.mixer:attention.heads` (every layer whose mixer is attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.base.limits import CONFIG_LAYERS
from dovetail.model.model import Model
from dovetail.spec.part import KINDS, Part

Config = Mapping[str, Any]
Settings = dict[str, Any]  # path pattern of our spec -> plain data

# activation name of theirs -> our kind; the first of several names is written
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}


class _Absent:
    """Stands for a path that a spec does not have."""


ABSENT = _Absent()


def value_at(spec: Any, pattern: str) -> Any:
    """The value at the first place that a pattern matches; ABSENT if there is none."""
    return _value_at(spec, pattern.split(".")) if pattern else spec


def _value_at(here: Any, names: list[str]) -> Any:
    if not names:
        return here
    (name, _, kind), rest = names[0].partition(":"), names[1:]
    if isinstance(here, tuple):
        items = here if name == "*" else here[int(name) : int(name) + 1] if name.isdigit() else ()
        return next((value for item in items if (value := _value_at(item, rest)) is not ABSENT), ABSENT)
    below = getattr(here, name) if isinstance(here, Part) and name in here.__dataclass_fields__ else ABSENT
    return ABSENT if kind and not is_kind(below, kind) else _value_at(below, rest)


def is_kind(value: Any, kind: str) -> bool:
    """Whether a value is a part of this kind."""
    return isinstance(value, Part) and type(value) is KINDS[kind]


class Field:
    """Some fields of a config, and the settings of our spec that they stand for."""

    names: tuple[str, ...]  # the config fields that it reads

    def to_hf(self, spec: Model) -> dict[str, Any]:
        """The config fields for a spec; empty where the config has no value for it."""
        return {}

    def from_hf(self, config: Config) -> Settings:
        """The settings for a config; empty where the config has no value."""
        return {}


class Copy(Field):
    """A value that means the same in a config and at one or several paths of ours."""

    def __init__(self, name: str, *paths: str) -> None:
        self.names, self.paths = (name,), paths

    def found(self, spec: Model) -> Any:
        """The value at the first of the paths that the spec has; ABSENT if it has none."""
        return next((value for path in self.paths if (value := value_at(spec, path)) is not ABSENT), ABSENT)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        value = self.found(spec)
        return {} if value is ABSENT else {self.names[0]: list(value) if isinstance(value, tuple) else value}

    def from_hf(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        return {} if value is None else dict.fromkeys(self.paths, value)


# sizes that most families call by these names
SIZES = (
    Copy("vocab_size", "vocab"),
    Copy("hidden_size", "width"),
    Copy("intermediate_size", "layers.*.ffn.hidden"),
    Copy("num_attention_heads", "layers.*.mixer.heads"),
)


class Nullable(Copy):
    """A value whose null is null here too, rather than the family's default."""

    def from_hf(self, config: Config) -> Settings:
        return dict.fromkeys(self.paths, config[self.names[0]]) if self.names[0] in config else {}


class Choice(Copy):
    """A word that names a kind of part. Several words may name one kind; the first is written."""

    def __init__(self, name: str, path: str, kinds: Mapping[str, str], *, also: Sequence[str] = ()) -> None:
        """`kinds` maps each word to our kind; `also` are further paths that are set."""
        super().__init__(name, path, *also)
        self.kinds = kinds

    def to_hf(self, spec: Model) -> dict[str, Any]:
        part = self.found(spec)
        words = [word for word, kind in self.kinds.items() if is_kind(part, kind)]
        return {self.names[0]: words[0]} if words else {}

    def from_hf(self, config: Config) -> Settings:
        word = config.get(self.names[0])
        if word is None:
            return {}
        if not isinstance(word, str) or word not in self.kinds:
            raise SpecError(f"config.{self.names[0]}", f"{word!r} is unsupported", f"supported: {', '.join(self.kinds)}")
        return dict.fromkeys(self.paths, self.kinds[word])


def matches(value: Any, data: Any) -> bool:
    """Whether a value equals plain data; for a part, whether it has that kind and the fields that the data names."""
    if not isinstance(value, Part) or not isinstance(data, Mapping):
        return bool(value == data)
    named = {name: item for name, item in data.items() if name != "kind"}
    return type(value) is KINDS[data["kind"]] and all(value_at(value, name) == item for name, item in named.items())


class Switch(Copy):
    """A config field that is true or false, for one of two values of ours."""

    def __init__(self, name: str, path: str, *, on: Any, off: Any) -> None:
        super().__init__(name, path)
        self.values = {True: on, False: off}

    def to_hf(self, spec: Model) -> dict[str, Any]:
        value = value_at(spec, self.paths[0])
        states = [state for state, data in self.values.items() if matches(value, data)]
        return {self.names[0]: states[0]} if states else {}

    def from_hf(self, config: Config) -> Settings:
        state = config.get(self.names[0])
        if state is not None and not isinstance(state, bool):
            raise SpecError(f"config.{self.names[0]}", f"{state!r} is not true or false")
        return {} if state is None else {self.paths[0]: self.values[state]}


class Transform(Copy):
    """A number that a config holds in another form, such as its inverse."""

    def __init__(self, name: str, *paths: str, to_hf: Callable[[Any], Any], from_hf: Callable[[Any], Any]) -> None:
        super().__init__(name, *paths)
        self.encode, self.decode = to_hf, from_hf

    def to_hf(self, spec: Model) -> dict[str, Any]:
        return {name: value if value is None else self.encode(value) for name, value in super().to_hf(spec).items()}

    def from_hf(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value == 0):
            raise SpecError(f"config.{self.names[0]}", f"{value!r} is not a number other than 0")
        return {} if value is None else dict.fromkeys(self.paths, self.decode(value))


class Implied(Copy):
    """A value that other config fields imply: it is written, and any other value is an error."""

    def __init__(self, name: str, path: str, *, by: Callable[[Config], Any], unsupported: str = "") -> None:
        """`by` computes the value; `unsupported` says what a different value would ask for."""
        super().__init__(name, path)
        self.by, self.unsupported = by, unsupported

    def from_hf(self, config: Config) -> Settings:
        value, implied = config.get(self.names[0]), self.by(config)
        if value is not None and value != implied:
            problem = f"{value!r} is unsupported" + (f": {self.unsupported}" if self.unsupported else "")
            raise SpecError(f"config.{self.names[0]}", problem, f"the other fields imply {implied!r}")
        return {}


class LegacyFixed(Field):
    """A field of older files with one supported value; it is read and not written."""

    def __init__(self, name: str, value: Any) -> None:
        self.names, self.value = (name,), value

    def from_hf(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        if value not in (None, self.value):
            raise SpecError(f"config.{self.names[0]}", f"{value!r} is unsupported", f"supported: {self.value!r}")
        return {}


def depth_of(config: Config, field: str) -> int:
    """The number of layers of a config; 0 for an invalid number, which `read_config` refuses."""
    count = config.get(field)
    return min(count, CONFIG_LAYERS) if isinstance(count, int) and not isinstance(count, bool) else 0


def integer(config: Config, field: str, default: int, least: int = 0) -> int:
    """An integer of a config, or the default where it is null or left out."""
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"config.{field}", f"{value!r} is not a whole number from {least} on")
    return value
