"""Read a config whose field names are all known: start from the family's spec with one layer, then apply the settings.

Each field of a dialect turns config values into settings, (path pattern, plain data). Settings are applied in this order:

    AROUND       outside the layers: `width`, `head.tied`
    PLACED       one layer, with the fields that its kind and the new one both have, or its part: `layers.3`, `layers.3.ffn`
    EVERY        every layer: `layers.*.norm.eps`
    ONE          one layer: `layers.3.mixer.mask`
    OF_A_KIND    the layers whose part has this kind: `layers.*.mixer:attention.heads`

Two fields that set one path to different values are an error: neither may silently replace the other.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from dovetail import parts as _registered  # noqa: F401  every kind must be registered before a config is read
from dovetail.base.errors import SpecError
from dovetail.base.limits import CONFIG_LAYERS
from dovetail.hf.field import ABSENT, Config, Field, value_at
from dovetail.hf.table import Dialect, Form
from dovetail.model.model import Model
from dovetail.model.swap import fit
from dovetail.nn.block import Block
from dovetail.spec.part import KINDS, from_data

AROUND, PLACED, EVERY, ONE, OF_A_KIND = range(5)


class FieldValue(NamedTuple):
    """One value for one path pattern, and the field of the dialect that set it."""

    field: Field
    path: str
    value: Any

    @property
    def reach(self) -> int:
        """When the setting is applied; see the top of the file."""
        names = self.path.split(".")
        if names[0] != "layers":
            return ONE if any(name.isdigit() for name in names[:3]) else AROUND
        if names[1].isdigit():
            return PLACED if len(names) <= 3 else ONE
        return OF_A_KIND if ":" in self.path else EVERY


@functools.cache
def base_spec(dialect: Dialect, form: Form) -> Model:
    """The spec of a family with one layer, before any config field is read."""
    return from_data({**dialect.spec, **(form.head or {})}, Model)


def read_config(config: Config, dialect: Dialect, form: Form) -> Model:
    """The spec of a config whose fields are all known; the dialect's spec says what the config leaves out."""
    spec = base_spec(dialect, form)
    settings = settings_of(config, dialect, form)
    spec = _applied(spec, config, settings, AROUND)
    encoder = 1 if dialect.encoder is None else _depth(config, dialect.encoder)
    layers, ahead = _depth(config, dialect.layers), _depth_ahead(config, dialect)
    spec = with_depth(spec, layers + ahead, encoder)
    for reach in (PLACED, EVERY, ONE, OF_A_KIND):
        spec = _applied(spec, config, settings, reach)
    return with_ahead(spec, layers)


def with_ahead(spec: Model, layers: int) -> Model:
    """The spec with this many layers; the blocks after them are those of multi-token prediction, one per depth."""
    mtp: Any = KINDS["mtp"]
    depths = tuple(mtp(block=block, norm=block.norm) for block in spec.layers[layers:])
    return dc.replace(spec, layers=spec.layers[:layers], mtp=depths)


def _depth_ahead(config: Config, dialect: Dialect) -> int:
    """The number of depths of multi-token prediction."""
    if dialect.ahead is None:
        return 0
    count, most = config.get(dialect.ahead.count) or 0, CONFIG_LAYERS if dialect.ahead.most is None else dialect.ahead.most
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
        raise SpecError(f"config.{dialect.ahead.count}", f"{count!r} is not a whole number from 0 to {most}")
    return count


def settings_of(config: Config, dialect: Dialect, form: Form) -> list[FieldValue]:
    """The settings of all fields, in the dialect's order. Raises SpecError where two fields set one path differently."""
    fields = (*dialect.fields, *form.fields)
    settings = [FieldValue(field, *setting) for field in fields for setting in field.from_hf(config).items()]
    first: dict[str, FieldValue] = {}
    for setting in settings:
        other = first.setdefault(setting.path, setting)
        if other.value != setting.value:
            path, first_name = setting.path, f"config.{_given(other.field, config)}"
            problem = f"sets {path} to {setting.value!r}, but {first_name} sets it to {other.value!r}"
            raise SpecError(f"config.{_given(setting.field, config)}", problem, "the two must agree")
    return settings


def _given(field: Field, config: Config) -> str:
    """The names of a field that a config has."""
    return ", ".join(name for name in field.names if name in config) or field.names[0]


def with_depth(spec: Model, layers: int, encoder: int) -> Model:
    """A spec of one layer with `layers` of them, and `encoder` layers in its encoder if it has one."""
    below = None if spec.encoder is None else with_depth(spec.encoder, encoder, 1)
    return dc.replace(spec, layers=spec.layers * layers, encoder=below)


def _depth(config: Config, field: str) -> int:
    count = config.get(field)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= CONFIG_LAYERS:
        raise SpecError(f"config.{field}", f"{count!r} is not a whole number from 1 to {CONFIG_LAYERS}")
    return count


def _applied(spec: Model, config: Config, settings: Sequence[FieldValue], reach: int) -> Model:
    """The spec after the settings of one reach."""
    layers = list(spec.layers)
    for setting in settings:
        if setting.reach != reach:
            continue
        try:
            if setting.path.startswith("layers."):
                _set_layers(layers, setting.path, setting.value)
            else:
                spec = spec.set(setting.path, setting.value)
        except SpecError as error:
            raise SpecError(f"config.{_given(setting.field, config)}", error.problem, error.remedy) from error
    distinct: dict[Block, Block] = {}
    return dc.replace(spec, layers=tuple(distinct.setdefault(layer, layer) for layer in layers))  # equal layers are one object


def _set_layers(layers: list[Block], pattern: str, value: Any) -> None:
    """Set one field in one layer, in every layer that has it, or in the layers whose part has the kind after the colon:
    `layers.3.ffn`, `layers.*.norm.eps`, `layers.*.mixer:attention.heads`; or give one layer another kind: `layers.3`."""
    _, which, *below = pattern.split(".", 2)
    if not below:
        layers[int(which)] = fit(value, layers[int(which)], Block)
        return
    (inside,) = below
    field = ".".join(name.partition(":")[0] for name in inside.split("."))
    has_field: dict[int, bool] = {}  # equal layers are one object, tested and changed once
    changed: dict[int, Block] = {}
    for i in range(len(layers)) if which == "*" else [int(which)]:
        layer = layers[i]
        if id(layer) not in changed:
            has_field[id(layer)] = value_at(layer, inside) is not ABSENT
            changed[id(layer)] = layer.set(field, value) if has_field[id(layer)] else layer
        layers[i] = changed[id(layer)]
    if ":" not in inside and not any(has_field.values()):
        raise SpecError(pattern, "no layer has such a field")
