"""What differs from layer to layer: sliding windows in some, full attention in others, RoPE parameters per layer type.

    layer_types: [sliding_attention, full_attention]   and   sliding_window: 4096      <->      layers.i.mixer.mask

A window counts the token itself, there and here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.base.limits import CONFIG_LAYERS
from dovetail.hf.field import ABSENT, Config, Field, Settings, integer, value_at
from dovetail.hf.rotary import LENGTH, Rotary
from dovetail.model.model import Model
from dovetail.nn.groups import Mask
from dovetail.spec.part import from_data

LAYER_TYPES, WINDOW = "layer_types", "sliding_window"
LOCAL, LOCAL_PERIOD = "local_attention", "global_attn_every_n_layers"
SLIDING, FULL = "sliding_attention", "full_attention"


def window_mask(size: Any) -> Any:
    """Plain data of a causal window of this size."""
    return ["causal", {"kind": "window", "size": size}]


def window_of(mask: Any) -> int | None:
    """The size of a causal window; None for any other mask."""
    size = value_at(mask, "masks") if isinstance(mask, Mask) else ()
    sizes = [value_at(part, "size") for part in size] if isinstance(size, tuple) else []
    found = next((one for one in sizes if isinstance(one, int)), None)
    return found if found is not None and mask == _mask(window_mask(found)) else None


def _mask(data: Any) -> Mask:
    return from_data(data, Mask)  # type: ignore[type-abstract]


class Window(Field):
    """One sliding window for all layers, or none; `switch` is the config field that turns it on."""

    def __init__(self, name: str = WINDOW, path: str = "layers.*.mixer.mask", *, switch: str | None = None) -> None:
        self.name, self.path, self.switch = name, path, switch
        self.names = (name,) if switch is None else (name, switch)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        size = window_of(value_at(spec, self.path))
        return {self.name: size, **({} if self.switch is None else {self.switch: size is not None})}

    def from_hf(self, config: Config) -> Settings:
        size = config.get(self.name) if self.switch is None or config.get(self.switch) else None
        return {self.path: "causal" if size is None else window_mask(size)}


def all_but_every(number: int, name: str | None = None) -> Callable[[Config, int], str]:
    """Of so many layers the last is full, the others slide; `name` is the config field with another number."""

    def default(config: Config, layer: int) -> str:
        return SLIDING if (layer + 1) % (number if name is None else integer(config, name, number, 1)) else FULL

    return default


class LayerTypes(Field):
    """The type of each layer, and the window of the sliding ones."""

    def __init__(
        self, layers: str, default: Callable[[Config, int], str], *, switch: str | None = None, also: Sequence[str] = ()
    ) -> None:
        """`layers` is the config field with their number; `default` gives the type of a layer where the list is missing;
        `switch` turns sliding on; `also` are fields that `default` reads and a list makes meaningless."""
        self.layers, self.default, self.switch = layers, default, switch
        self.names = (LAYER_TYPES, WINDOW, *([] if switch is None else [switch]), *also)

    def types(self, config: Config) -> list[str]:
        """The type of every layer."""
        count, listed = config.get(self.layers), config.get(LAYER_TYPES)
        if not isinstance(count, int):
            return []  # an error is raised where layers are counted
        if listed is None:
            return [self.default(config, i) for i in range(min(count, CONFIG_LAYERS))]
        if not isinstance(listed, (list, tuple)) or len(listed) != count:
            raise SpecError(f"config.{LAYER_TYPES}", f"is not a list of {count} types, one per layer")
        for i, word in enumerate(listed):
            if word not in (SLIDING, FULL):
                raise SpecError(f"config.{LAYER_TYPES}.{i}", f"{word!r} is unsupported", f"supported: {FULL}, {SLIDING}")
        return list(listed)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        windows = [window_of(value_at(block, "mixer.mask")) for block in spec.layers]
        sizes = {size for size in windows if size is not None}
        types = [FULL if size is None else SLIDING for size in windows]
        switched = {} if self.switch is None else {self.switch: bool(sizes)}
        # without a sliding layer no size is written: some of their models need their own default
        return {LAYER_TYPES: types, **({WINDOW: min(sizes)} if sizes else {}), **switched}

    def from_hf(self, config: Config) -> Settings:
        masks: Mapping[str, Any] = {FULL: "causal", SLIDING: window_mask(config.get(WINDOW))}
        types = self.types(config)
        if SLIDING in types and config.get(WINDOW) is None:
            raise SpecError(f"config.{WINDOW}", "is missing, but some layers slide")
        return {f"layers.{i}.mixer.mask": masks[word] for i, word in enumerate(types) if word == SLIDING}


class NoPEInFull(Field):
    """No positions in full layers (Cohere 2); `unless_null`: only where there is a sliding window at all (EXAONE 4)."""

    names = (LAYER_TYPES,)

    def __init__(self, types: LayerTypes, *, unless_null: bool = False) -> None:
        self.layer_types, self.unless_null = types, unless_null

    def to_hf(self, spec: Model) -> dict[str, Any]:
        full = [block for block in spec.layers if window_of(value_at(block, "mixer.mask")) is None]
        rotated = any(value_at(block, "mixer.position:rope") is not ABSENT for block in full)
        return {WINDOW: None} if self.unless_null and rotated else {}

    def from_hf(self, config: Config) -> Settings:
        rotates = self.unless_null and config.get(WINDOW) is None
        types = [] if rotates else self.layer_types.types(config)
        return {f"layers.{i}.mixer.position": "none" for i, word in enumerate(types) if word == FULL}


class LocalAttention(LayerTypes):
    """Windows of half of `local_attention` to either side. The first layer has no norm, as it follows the embedding's."""

    def __init__(self) -> None:
        super().__init__("num_hidden_layers", self.every_third)
        self.names = (LAYER_TYPES, LOCAL, LOCAL_PERIOD)

    @staticmethod
    def every_third(config: Config, layer: int) -> str:
        """The first of three layers is full."""
        every = config.get(LOCAL_PERIOD, 3)
        if type(every) is not int or every < 1:
            raise SpecError(f"config.{LOCAL_PERIOD}", f"{every!r} is not a whole number above 0")
        return SLIDING if layer % every else FULL

    def to_hf(self, spec: Model) -> dict[str, Any]:
        sizes = [value_at(block, "mixer.mask:window.size") for block in spec.layers]
        found = [size for size in sizes if isinstance(size, int)]
        types = [SLIDING if isinstance(size, int) else FULL for size in sizes]
        return {LAYER_TYPES: types, **({LOCAL: 2 * (min(found) - 1)} if found else {})}

    def from_hf(self, config: Config) -> Settings:
        reach = config.get(LOCAL, 128)
        if type(reach) is not int or reach < 0:
            raise SpecError(f"config.{LOCAL}", f"{reach!r} is not a whole number from 0")
        masks = {FULL: "full", SLIDING: {"kind": "window", "size": reach // 2 + 1}}
        found: Settings = {f"layers.{i}.mixer.mask": masks[word] for i, word in enumerate(self.types(config))}
        return {"layers.0.wire.first_norm": False, **found}


class RotaryByType(Field):
    """RoPE parameters per layer type; older files have one field per base, and one scaling for some types."""

    def __init__(self, types: LayerTypes, bases: Mapping[str, tuple[str, float]], scaled: Sequence[str]) -> None:
        """`bases` is the older field and the default base of each type; `scaled` are the types that an older scaling is for."""
        self.types, self.bases, self.scaled = types, bases, scaled
        self.names = ("rope_parameters", "rope_scaling", LENGTH, *(name for name, _ in bases.values()))

    def to_hf(self, spec: Model) -> dict[str, Any]:
        types = self.types.to_hf(spec)[LAYER_TYPES]
        ropes = {word: Rotary(f"layers.{types.index(word)}.mixer.position").to_hf(spec) for word in sorted(set(types))}
        return {"rope_parameters": {word: one["rope_parameters"] for word, one in ropes.items() if one}}

    def from_hf(self, config: Config) -> Settings:
        ropes, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        for name, value in (("rope_parameters", ropes), ("rope_scaling", scaling)):
            if not isinstance(value, Mapping):
                raise SpecError(f"config.{name}", f"{value!r} is not a mapping")
        result: Settings = {}
        for i, word in enumerate(self.types.types(config)):
            field, base = self.bases[word]
            old = {"rope_theta": config.get(field, base), **(scaling if word in self.scaled else {})}
            result |= Rotary(f"layers.{i}.mixer.position").from_hf(
                {"rope_parameters": ropes.get(word) or old, LENGTH: config.get(LENGTH)}
            )
        return result
