"""A spec with every size written out, and where two specs differ: how a config is compared with a spec.

kv_heads: null  ->  kv_heads: 8          a null stands for a size; a config has a number there
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.model.model import Model
from dovetail.nn.groups import Scaling
from dovetail.spec.part import Part, field_types, join, walk

# a null in one of these fields stands for the size of the axes, the first of several that the part has
STANDS_FOR = {
    "kv_heads": (("kv_heads",),),
    "head": (("head",),),
    "hidden": (("ffn",), ("hidden",)),
    "inner": (("inner",), ("heads", "head")),
    "rank": (("rank",),),
    "key_heads": (("key_heads",),),
    "key_size": (("key",),),
    "value_size": (("value",),),
}


def explicit(spec: Model) -> Model:
    """The spec with every size written out that a null stands for, and equal factors of a rotary scaling as one factor."""
    sizes: dict[str, dict[str, Any]] = {}
    for path, part, scope in walk(spec):
        hints = field_types(type(part))
        for field, choices in STANDS_FOR.items():
            if hints.get(field) == int | None and getattr(part, field) is None:
                axes = next(axes for axes in choices if set(axes) <= scope.sizes.keys())
                sizes.setdefault(path, {})[field] = scope.size(*axes)
        for name, below in part.parts().items():
            for field in dc.fields(below) if isinstance(below, Scaling) else ():
                value = getattr(below, field.name)
                if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1 and isinstance(value[0], float):
                    sizes.setdefault(join(path, name), {})[field.name] = value[:1]
    return _rewritten(spec, sizes, "")


def untrained(spec: Model, other: Model) -> Model:
    """The spec with the initialization and the loss weights of another, which do not change what a model computes."""
    depths = tuple(dc.replace(one, weight=like.weight) for one, like in zip(spec.mtp, other.mtp, strict=False))
    encoder = spec.encoder and other.encoder and dc.replace(spec.encoder, init=other.encoder.init)
    return dc.replace(spec, init=other.init, mtp=depths + spec.mtp[len(depths) :], encoder=encoder or spec.encoder)


def _rewritten(value: Any, sizes: Mapping[str, dict[str, Any]], path: str) -> Any:
    """The tree with other fields at these paths, in one pass."""
    if isinstance(value, tuple):
        return tuple(_rewritten(item, sizes, join(path, str(i))) for i, item in enumerate(value))
    if not isinstance(value, Part):
        return value
    fields = {f.name: _rewritten(getattr(value, f.name), sizes, join(path, f.name)) for f in dc.fields(value)}
    return dc.replace(value, **{**fields, **sizes.get(path, {})})


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value of the first, value of the second) wherever two specs differ."""
    if isinstance(ours, Part) and type(ours) is type(theirs):
        for field in dc.fields(ours):
            yield from differences(getattr(ours, field.name), getattr(theirs, field.name), join(path, field.name))
    elif (
        isinstance(ours, tuple)
        and isinstance(theirs, tuple)
        and len(ours) == len(theirs)
        and ours
        and isinstance(ours[0], Part)
    ):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, join(path, str(i)))
    elif ours != theirs:
        yield path, ours, theirs
