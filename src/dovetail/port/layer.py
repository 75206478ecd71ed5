"""What differs from layer to layer: windows in some, full attention in others, a rope of their own, a word for each layer.

    layer_types: [sliding_attention, full_attention]   and   sliding_window: 4096      <->      layers.i.mixer.mask

A window of theirs counts the token itself, as ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.core.group import Mask
from dovetail.core.part import from_data
from dovetail.model import Model
from dovetail.port.rotary import LENGTH, Rotary
from dovetail.port.table import Config, Settings, look

LAYER_TYPES, WINDOW = "layer_types", "sliding_window"
LOCAL, LOCAL_PERIOD = "local_attention", "global_attn_every_n_layers"
SLIDING, FULL = "sliding_attention", "full_attention"


def window_mask(size: Any) -> Any:
    """Plain data of a causal window of this size."""
    return ["causal", {"kind": "window", "size": size}]


def window_of(mask: Any) -> int | None:
    """The size of a causal window; None for any other mask."""
    size = look(mask, "masks") if isinstance(mask, Mask) else ()
    sizes = [look(part, "size") for part in size] if isinstance(size, tuple) else []
    found = next((one for one in sizes if isinstance(one, int)), None)
    return found if found is not None and mask == _mask(window_mask(found)) else None


def _mask(data: Any) -> Mask:
    return from_data(data, Mask)  # type: ignore[type-abstract]


class Window:
    """One window for all layers, or none; `switch` is their field that says whether there is one."""

    def __init__(self, theirs: str = WINDOW, ours: str = "layers.*.mixer.mask", *, switch: str | None = None) -> None:
        self.theirs, self.ours, self.switch = theirs, ours, switch
        self.names = (theirs,) if switch is None else (theirs, switch)

    def give(self, spec: Model) -> dict[str, Any]:
        size = window_of(look(spec, self.ours))
        return {self.theirs: size, **({} if self.switch is None else {self.switch: size is not None})}

    def take(self, config: Config) -> Settings:
        size = config.get(self.theirs) if self.switch is None or config.get(self.switch) else None
        return {self.ours: "causal" if size is None else window_mask(size)}


class LayerTypes:
    """A word for each layer, and the window of those that have one."""

    def __init__(
        self, layers: str, usual: Callable[[Config, int], str], *, switch: str | None = None, also: Sequence[str] = ()
    ) -> None:
        """`layers` counts them; `usual` is the word for a layer where the list is missing; `switch` says whether any slides;
        `also` are fields that only `usual` reads, and that say nothing once there is a list."""
        self.layers, self.usual, self.switch = layers, usual, switch
        self.names = (LAYER_TYPES, WINDOW, *([] if switch is None else [switch]), *also)

    def words(self, config: Config) -> list[str]:
        """The word of every layer."""
        count, said = config.get(self.layers), config.get(LAYER_TYPES)
        if not isinstance(count, int):
            return []  # an error is raised where layers are counted
        if said is None:
            return [self.usual(config, i) for i in range(min(count, 10_000))]
        if not isinstance(said, (list, tuple)) or len(said) != count:
            raise SpecError(f"config.{LAYER_TYPES}", f"is not a list of {count} words, one for each layer")
        for i, word in enumerate(said):
            if word not in (SLIDING, FULL):
                raise SpecError(f"config.{LAYER_TYPES}.{i}", f"{word!r} is not known", f"known: {FULL}, {SLIDING}")
        return list(said)

    def give(self, spec: Model) -> dict[str, Any]:
        windows = [window_of(look(block, "mixer.mask")) for block in spec.layers]
        sizes = {size for size in windows if size is not None}
        words = [FULL if size is None else SLIDING for size in windows]
        switched = {} if self.switch is None else {self.switch: bool(sizes)}
        # where none slides the size is left to them: some of their models ask for one in any case
        return {LAYER_TYPES: words, **({WINDOW: min(sizes)} if sizes else {}), **switched}

    def take(self, config: Config) -> Settings:
        masks: Mapping[str, Any] = {FULL: "causal", SLIDING: window_mask(config.get(WINDOW))}
        words = self.words(config)
        if SLIDING in words and config.get(WINDOW) is None:
            raise SpecError(f"config.{WINDOW}", "is missing, yet layers slide")
        return {f"layers.{i}.mixer.mask": masks[word] for i, word in enumerate(words) if word == SLIDING}


class Local(LayerTypes):
    """Windows that reach half of `local_attention` to either side; the first layer reads what the embedding's norm gave."""

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

    def give(self, spec: Model) -> dict[str, Any]:
        sizes = [look(block, "mixer.mask:window.size") for block in spec.layers]
        found = [size for size in sizes if isinstance(size, int)]
        words = [SLIDING if isinstance(size, int) else FULL for size in sizes]
        return {LAYER_TYPES: words, **({LOCAL: 2 * (min(found) - 1)} if found else {})}

    def take(self, config: Config) -> Settings:
        reach = config.get(LOCAL, 128)
        if type(reach) is not int or reach < 0:
            raise SpecError(f"config.{LOCAL}", f"{reach!r} is not a whole number from 0")
        masks = {FULL: "full", SLIDING: {"kind": "window", "size": reach // 2 + 1}}
        found: Settings = {f"layers.{i}.mixer.mask": masks[word] for i, word in enumerate(self.words(config))}
        return {"layers.0.wire.first_norm": False, **found}


class RotaryByType:
    """A rope for each type of layer; older files have a field for the base of each, and one scaling for some."""

    def __init__(self, types: LayerTypes, bases: Mapping[str, tuple[str, float]], scaled: Sequence[str]) -> None:
        """`bases` is their older field and the usual base for each type; `scaled` are the types an older scaling is for."""
        self.types, self.bases, self.scaled = types, bases, scaled
        self.names = ("rope_parameters", "rope_scaling", LENGTH, *(name for name, _ in bases.values()))

    def give(self, spec: Model) -> dict[str, Any]:
        words = self.types.give(spec)[LAYER_TYPES]
        said = {word: Rotary(f"layers.{words.index(word)}.mixer.position").give(spec) for word in sorted(set(words))}
        return {"rope_parameters": {word: one["rope_parameters"] for word, one in said.items() if one}}

    def take(self, config: Config) -> Settings:
        said, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        for name, value in (("rope_parameters", said), ("rope_scaling", scaling)):
            if not isinstance(value, Mapping):
                raise SpecError(f"config.{name}", f"{value!r} is not a mapping")
        found: Settings = {}
        for i, word in enumerate(self.types.words(config)):
            field, base = self.bases[word]
            old = {"rope_theta": config.get(field, base), **(scaling if word in self.scaled else {})}
            found |= Rotary(f"layers.{i}.mixer.position").take(
                {"rope_parameters": said.get(word) or old, LENGTH: config.get(LENGTH)}
            )
        return found
