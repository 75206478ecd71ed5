"""Which family of Hugging Face models can express a spec."""

from __future__ import annotations

from dovetail.base.errors import SpecError
from dovetail.hf.hf import to_hf
from dovetail.model.model import Model


def expressible(spec: Model) -> str | None:
    """The name of the first dialect that can express this spec; None if there is none."""
    try:
        return to_hf(spec).dialect
    except SpecError:
        return None
