"""Dovetail: change one part of a transformer; everything else fits, and proves it.

Public names are resolved when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Ctx": "dovetail.core.ctx",
    "DovetailError": "dovetail.core.errors",
    "Listener": "dovetail.core.ctx",
    "Model": "dovetail.model",
    "Pool": "dovetail.state.pool",
    "SpecError": "dovetail.core.errors",
    "TokenLayout": "dovetail.core.layout",
    "build": "dovetail.construction",
    "check": "dovetail.core.check",
    "diff": "dovetail.api.diff",
    "emit": "dovetail.api.emit",
    "from_yaml": "dovetail.io.spec",
    "graft": "dovetail.surgery.graft",
    "list_parts": "dovetail.api.list_parts",
    "load": "dovetail.port.load",
    "load_spec": "dovetail.io.spec",
    "save": "dovetail.io.model_dir",
    "show": "dovetail.api.show",
    "to_yaml": "dovetail.io.spec",
}

if TYPE_CHECKING:
    from dovetail.api.diff import diff as diff
    from dovetail.api.emit import emit as emit
    from dovetail.api.list_parts import list_parts as list_parts
    from dovetail.api.show import show as show
    from dovetail.construction import build as build
    from dovetail.core.check import check as check
    from dovetail.core.ctx import Ctx as Ctx
    from dovetail.core.ctx import Listener as Listener
    from dovetail.core.errors import DovetailError as DovetailError
    from dovetail.core.errors import SpecError as SpecError
    from dovetail.core.layout import TokenLayout as TokenLayout
    from dovetail.io.model_dir import save as save
    from dovetail.io.spec import from_yaml as from_yaml
    from dovetail.io.spec import load_spec as load_spec
    from dovetail.io.spec import to_yaml as to_yaml
    from dovetail.model import Model as Model
    from dovetail.port.load import load as load
    from dovetail.state.pool import Pool as Pool
    from dovetail.surgery.graft import graft as graft


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"dovetail has no {name!r}")


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])
