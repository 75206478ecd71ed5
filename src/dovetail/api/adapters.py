"""Attach, save and remove adapters of a model.

model = dt.load("base")
print(dt.attach(model, "lora"))                      lora: applied 168 of 168, …; the model's own weights are frozen
…                                                    train it
dt.save_adapter(model, "my-adapter", base="base")    or layout="peft"
model = dt.load("base", adapter="my-adapter")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dovetail.base.errors import SpecError
from dovetail.hf.adapter import family_of
from dovetail.hf.peft import write_peft
from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.weights.adapters import attach as attaching
from dovetail.weights.adapters.attach import Applied
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.storage import Base, Stored, adapter_tensors, fingerprint, write_adapter


def attach(model: Transformer, adapter: AdapterKind | str | Mapping[str, Any], *, seed: int = 0) -> Applied:
    """Attach an adapter to the linear leaves of a model and freeze its own weights; return what was applied.

    adapter: a kind (`lora`, `dora`, `ia3`), a mapping with its fields, or a part. By default every linear leaf is adapted but
    readouts (the head over the vocabulary, the scores of experts); `targets` names others, by path, by the end of a path, or
    by role. A target without a leaf, and a leaf that cannot be adapted, are errors.
    """
    return attaching.attach(model, adapter, seed=seed)


def save_adapter(
    model: Transformer,
    directory: str | Path,
    *,
    base: str | Path | None = None,
    layout: Literal["dovetail", "peft"] = "dovetail",
    family: str | None = None,
) -> None:
    """Write the adapters of a model as an adapter directory, of ours or in peft's layout, with the fingerprint of the model's
    own weights. `base` is the directory of the model, which `load` opens the adapter with; `family` that of peft's module
    names, by default the one of the base, else the first that can express the model."""
    named = Base(None if base is None else str(base), fingerprint(model, model.spec))
    stored, place = Stored(kind_of(model), named, adapter_tensors(model)), Path(directory)
    if layout == "peft":
        write_peft(place, model.spec, stored, family or (None if base is None else family_of(base)))
        stored = stored._replace(tensors={})  # adapter.yaml holds the fingerprint
    write_adapter(place, stored)


def kind_of(model: Transformer) -> AdapterKind:
    """The kind of a model's adapters; SpecError where it has none."""
    for _, leaf in adapted_leaves(model):
        if (
            leaf.adapter is not None
            and leaf.adapter.declared
            and isinstance(kind := leaf.adapter.declared[0].part, AdapterKind)
        ):
            return kind
    raise SpecError("adapter", "the model has none that could be saved", "attach one with attach(model, 'lora')")
