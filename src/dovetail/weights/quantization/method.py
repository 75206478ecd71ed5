"""Methods: how the codes of a matrix are chosen.

rtn    the nearest level of each value; needs no text
gptq   codes that make up for each other's errors on the inputs of a text (gptq.py)
awq    a scale per input channel, from the inputs of a text, folded where that is exact; then the nearest level (awq.py)

report = apply(model, recipe, "gptq", batches, watch)        in place, layer by layer
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.base.errors import UsageError, names_or_nearest
from dovetail.model.transformer import Transformer
from dovetail.nn.linear import Linear, is_plain
from dovetail.ops.formats.format import Format
from dovetail.spec.fold import declared
from dovetail.weights.quantization.awq import fold_exactly, leaf_folds, norm_fold, search
from dovetail.weights.quantization.calibrate import Seen, Watch, check_calibrates, layers_of, observed, run
from dovetail.weights.quantization.gptq import gptq
from dovetail.weights.quantization.recipe import Recipe, leaf_at, put_leaf, quantize

PROBE = 32  # tokens on which a fold is tested


@dc.dataclass
class MethodResult:
    """What a method did: leaves that were quantized, and how many of them got a scale per input that is folded."""

    leaves: int = 0
    folded: int = 0


@dc.dataclass(frozen=True)
class Stage:
    """One layer: its leaves and their formats, and what was observed of their inputs."""

    model: Transformer
    layer: str
    formats: Mapping[str, Format]
    seen: Seen
    probe: Tensor  # (1, n) tokens


def by_gptq(stage: Stage, applied: MethodResult) -> None:
    """Choose the codes of one layer by GPTQ; a leaf that no token reached by nearest level."""
    for path, format in stage.formats.items():
        w = leaf_at(stage.model, path).weight.detach()
        inputs = stage.seen.inputs.get(path)
        tensors = format.encode(w) if inputs is None else gptq(w, inputs.hessian, format)
        put_leaf(stage.model, stage.model.part, path, format, tensors)


def by_awq(stage: Stage, applied: MethodResult) -> None:
    """Scale the inputs of the leaves of one layer, and round to nearest."""
    model, weights = stage.model, list(declared(stage.model.part))
    together: dict[int, list[str]] = {}
    for path in stage.formats:
        inputs = stage.seen.inputs.get(path)
        if inputs is not None and inputs.sum.dim() == 2 and is_plain(leaf_at(model, path)):
            together.setdefault(id(inputs), []).append(path)
    for paths in together.values():
        leaves = [leaf_at(model, path) for path in paths]
        hessian = stage.seen.inputs[paths[0]].hessian
        scale = search([leaf.weight for leaf in leaves], hessian, [stage.formats[path] for path in paths])
        if bool((scale == 1).all()):  # rounding to nearest is best
            continue
        sources = {stage.seen.source.get(path) for path in paths}
        source = sources.pop() if len(sources) == 1 else None
        folds = [norm_fold(model, source, weights, scale)] if source else leaf_folds(model, paths[0], scale)
        if any(fold_exactly(fold, leaves, scale, lambda: _output(stage)) for fold in folds):
            applied.folded += len(paths)
    quantize(model, model.part, stage.formats)


def _output(stage: Stage) -> Tensor:
    output = run(stage.model, stage.probe, stage.layer)
    assert output is not None, f"{stage.layer}: did not run"
    return output.float()


METHODS: dict[str, Callable[[Stage, MethodResult], None] | None] = {"rtn": None, "gptq": by_gptq, "awq": by_awq}


def method_needs_text(name: str) -> bool:
    """Whether a method reads calibration text; UsageError for an unknown one."""
    if name not in METHODS:
        raise UsageError(f"--method {name}: no such method; {names_or_nearest(name, METHODS, 'methods')}")
    return METHODS[name] is not None


@torch.no_grad()
def apply(
    model: Transformer, recipe: Recipe, method: str, batches: Sequence[Tensor] = (), watch: Watch | None = None
) -> MethodResult:
    """Store the leaves of a recipe in their formats, in place, by a method; `batches` are token ids (rows, n) of calibration
    text. `watch` is called with (batches done, batches in all)."""
    applied, spec = MethodResult(leaves=len(recipe)), model.part
    if not method_needs_text(method):
        quantize(model, spec, recipe)
        return applied
    check_calibrates(spec)
    choose = METHODS[method]
    assert choose is not None
    if not batches:
        raise UsageError(f"--method {method}: needs calibration text; give --text")
    shared = any(block.shares is not None for block in spec.layers)  # a leaf then runs in later layers, too
    norms = [path for path, module in model.named_modules() if not list(module.children()) and not isinstance(module, Linear)]
    layers = layers_of(spec, list(recipe))
    done, total = 0, len(layers) * len(batches)
    for layer, paths in layers.items():
        with observed(model, paths, [path for path in norms if path.startswith(f"{layer}.")]) as seen:
            for batch in batches:
                run(model, batch, None if shared else layer)
                done += 1
                if watch is not None:
                    watch(done, total)
        choose(Stage(model, layer, {path: recipe[path] for path in paths}, seen, batches[0][:1, :PROBE]), applied)
    return applied
