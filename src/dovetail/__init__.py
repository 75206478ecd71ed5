"""Dovetail: change one part of a transformer; everything else fits, and proves it.

Public names are resolved when first used, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names: editors read these imports, and `_modules` finds in them which module defines a name.
if TYPE_CHECKING:
    from dovetail import look as look, parts as parts
    from dovetail.api.adapters import attach as attach, save_adapter as save_adapter
    from dovetail.api.build_data import build_data as build_data
    from dovetail.api.can_serve import can_serve as can_serve
    from dovetail.api.chat import chat as chat
    from dovetail.api.check_exercise import check_exercise as check_exercise
    from dovetail.api.check_node import check_node as check_node
    from dovetail.api.copy_recipe import copy_recipe as copy_recipe
    from dovetail.api.diff import diff as diff
    from dovetail.api.embed import embed as embed, rerank as rerank
    from dovetail.api.emit import emit as emit
    from dovetail.api.export import export as export
    from dovetail.api.generate import generate as generate
    from dovetail.api.graft import graft as graft
    from dovetail.api.import_ import import_ as import_
    from dovetail.api.lab import lab as lab
    from dovetail.api.laws import laws as laws
    from dovetail.api.learn_tokenizer import learn_tokenizer as learn_tokenizer
    from dovetail.api.list_exercises import list_exercises as list_exercises
    from dovetail.api.list_families import list_families as list_families
    from dovetail.api.list_parts import list_parts as list_parts
    from dovetail.api.list_recipes import list_recipes as list_recipes
    from dovetail.api.map import draw as draw, map as map
    from dovetail.api.match import match as match
    from dovetail.api.merge import merge as merge
    from dovetail.api.models import build as build, load as load, save as save
    from dovetail.api.mup_check import mup_check as mup_check
    from dovetail.api.plan import plan as plan
    from dovetail.api.plan_serving import plan_serving as plan_serving
    from dovetail.api.probe import probe as probe
    from dovetail.api.prune_heads import prune_heads as prune_heads
    from dovetail.api.quantize import quantize as quantize
    from dovetail.api.record import record as record
    from dovetail.api.runs import runs as runs
    from dovetail.api.sample import sample as sample
    from dovetail.api.scaling import scaling as scaling
    from dovetail.api.serve import serve as serve
    from dovetail.api.serve_vllm import serve_vllm as serve_vllm
    from dovetail.api.show import show as show
    from dovetail.api.show_data import show_data as show_data
    from dovetail.api.tiny import tiny as tiny
    from dovetail.api.train import train as train
    from dovetail.api.tune import tune as tune
    from dovetail.api.verify import verify as verify
    from dovetail.base.errors import DovetailError as DovetailError, SpecError as SpecError
    from dovetail.files.spec import from_yaml as from_yaml, load_spec as load_spec, to_yaml as to_yaml
    from dovetail.model.model import Model as Model
    from dovetail.model.transformer import Transformer as Transformer
    from dovetail.nn.block import Block as Block
    from dovetail.nn.ctx import Ctx as Ctx, Listener as Listener
    from dovetail.nn.layout import TokenLayout as TokenLayout
    from dovetail.parts.functional import (
        attention as attention,
        attention_weights as attention_weights,
        layer_norm as layer_norm,
        positions as positions,
        rope as rope,
        scan as scan,
    )
    from dovetail.spec.check import check as check
    from dovetail.state.pool import Pool as Pool
    from dovetail.views.recipe import Recipe as Recipe


def _modules() -> dict[str, str]:
    """Return the module of each public name."""
    from dovetail.base.public_names import public_modules  # when a name is first used: `import dovetail` parses nothing

    return public_modules(__name__)


def __getattr__(name: str) -> Any:
    if name in ("parts", "look"):  # packages: dt.parts.Attention, dt.look.trace
        return importlib.import_module(f"dovetail.{name}")
    if name == "__all__":
        return sorted(_modules())
    modules = {} if name.startswith("__") else _modules()
    if name not in modules:
        from dovetail.base.errors import did_you_mean

        raise AttributeError(f"dovetail has no {name!r}; {did_you_mean(name, modules)}".removesuffix("; "))
    public = getattr(importlib.import_module(modules[name]), name)
    if not isinstance(public, type):  # classes are decorated where they stand
        from dovetail.base.option import public_function

        public = public_function(public)
    globals()[name] = public
    return public


def __dir__() -> list[str]:
    return sorted([*_modules(), "__version__"])
