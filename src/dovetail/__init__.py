"""Dovetail: change one part of a transformer; everything else fits, and proves it.

Public names are resolved when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dovetail.core.keywords import checks_keywords
from dovetail.core.option import checks_options, names_options
from dovetail.core.option_group import accepts_groups

__version__ = "0.1.0"

_PUBLIC = {
    "Block": "dovetail.model",
    "Ctx": "dovetail.core.ctx",
    "DovetailError": "dovetail.core.errors",
    "Listener": "dovetail.core.ctx",
    "Model": "dovetail.model",
    "Pool": "dovetail.state.pool",
    "SpecError": "dovetail.core.errors",
    "TokenLayout": "dovetail.core.layout",
    "Transformer": "dovetail.transformer",
    "attach": "dovetail.api.adapters",
    "build": "dovetail.api.models",
    "build_data": "dovetail.api.build_data",
    "can_serve": "dovetail.api.can_serve",
    "chat": "dovetail.api.chat",
    "check": "dovetail.core.check",
    "check_node": "dovetail.api.check_node",
    "diff": "dovetail.api.diff",
    "embed": "dovetail.api.embed",
    "emit": "dovetail.api.emit",
    "export": "dovetail.api.export",
    "from_yaml": "dovetail.files.spec",
    "generate": "dovetail.api.generate",
    "graft": "dovetail.api.graft",
    "import_": "dovetail.api.import_",
    "laws": "dovetail.api.laws",
    "list_families": "dovetail.api.list_families",
    "list_parts": "dovetail.api.list_parts",
    "load": "dovetail.api.models",
    "load_spec": "dovetail.files.spec",
    "map": "dovetail.api.map",
    "match": "dovetail.api.match",
    "merge": "dovetail.api.merge",
    "mup_check": "dovetail.api.mup_check",
    "plan": "dovetail.api.plan",
    "plan_serving": "dovetail.api.plan_serving",
    "quantize": "dovetail.api.quantize",
    "record": "dovetail.api.record",
    "rerank": "dovetail.api.embed",
    "runs": "dovetail.api.runs",
    "save": "dovetail.api.models",
    "save_adapter": "dovetail.api.adapters",
    "serve": "dovetail.api.serve",
    "serve_vllm": "dovetail.api.serve_vllm",
    "show": "dovetail.api.show",
    "show_data": "dovetail.api.show_data",
    "tiny": "dovetail.api.tiny",
    "to_yaml": "dovetail.files.spec",
    "train": "dovetail.api.train",
    "tune": "dovetail.api.tune",
    "verify": "dovetail.api.verify",
}

if TYPE_CHECKING:
    from dovetail import parts as parts
    from dovetail.api.adapters import attach as attach, save_adapter as save_adapter
    from dovetail.api.build_data import build_data as build_data
    from dovetail.api.can_serve import can_serve as can_serve
    from dovetail.api.chat import chat as chat
    from dovetail.api.check_node import check_node as check_node
    from dovetail.api.diff import diff as diff
    from dovetail.api.embed import embed as embed, rerank as rerank
    from dovetail.api.emit import emit as emit
    from dovetail.api.export import export as export
    from dovetail.api.generate import generate as generate
    from dovetail.api.graft import graft as graft
    from dovetail.api.import_ import import_ as import_
    from dovetail.api.laws import laws as laws
    from dovetail.api.list_families import list_families as list_families
    from dovetail.api.list_parts import list_parts as list_parts
    from dovetail.api.map import map as map
    from dovetail.api.match import match as match
    from dovetail.api.merge import merge as merge
    from dovetail.api.models import build as build, load as load, save as save
    from dovetail.api.mup_check import mup_check as mup_check
    from dovetail.api.plan import plan as plan
    from dovetail.api.plan_serving import plan_serving as plan_serving
    from dovetail.api.quantize import quantize as quantize
    from dovetail.api.record import record as record
    from dovetail.api.runs import runs as runs
    from dovetail.api.serve import serve as serve
    from dovetail.api.serve_vllm import serve_vllm as serve_vllm
    from dovetail.api.show import show as show
    from dovetail.api.show_data import show_data as show_data
    from dovetail.api.tiny import tiny as tiny
    from dovetail.api.train import train as train
    from dovetail.api.tune import tune as tune
    from dovetail.api.verify import verify as verify
    from dovetail.core.check import check as check
    from dovetail.core.ctx import Ctx as Ctx, Listener as Listener
    from dovetail.core.errors import DovetailError as DovetailError, SpecError as SpecError
    from dovetail.core.layout import TokenLayout as TokenLayout
    from dovetail.files.spec import from_yaml as from_yaml, load_spec as load_spec, to_yaml as to_yaml
    from dovetail.model import Block as Block, Model as Model
    from dovetail.state.pool import Pool as Pool
    from dovetail.transformer import Transformer as Transformer


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        public = getattr(importlib.import_module(_PUBLIC[name]), name)
        if not isinstance(public, type):  # classes are decorated where they stand
            public = names_options(accepts_groups(checks_keywords(checks_options(public))))
        globals()[name] = public
        return globals()[name]
    if name == "parts":  # the package of part classes: dt.parts.Attention
        return importlib.import_module("dovetail.parts")
    raise AttributeError(f"dovetail has no {name!r}")


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])
