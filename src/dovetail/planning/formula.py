"""Parameters and FSDP traffic of one rank in closed form, to rank many layouts before a few are traced. No torch.

    a weight (rows, …) that tensor parallelism has cut is padded to whole rows per shard:      ⌈rows/shards⌉ · shards · rest
    per micro-batch    all-gather      2 · layers + the rest of the model          in the dtype of compute
                       reduce-scatter  layers + the rest                           in float32

tests/planning/test_formula.py holds both against the trace: they are equal.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from math import prod

from dovetail.account import account
from dovetail.model.model import Model
from dovetail.parallel.layout import Layout
from dovetail.parallel.placement import Cut, local_slices, placed, tp_regions
from dovetail.planning.device import Device
from dovetail.planning.trace import Setting
from dovetail.spec.fold import Declared, declared

BYTES = {"bf16": 2, "fp32": 4}
STATE = 16  # bytes per parameter: float32 weight, gradient, and AdamW's two moments
UNFUSED = 1.8  # compute ÷ that of matrix products alone, about: kernels are not fused
KEPT = {"none": 1.0, "selective": 0.6}  # of the activations of a layer, about


@dc.dataclass(frozen=True)
class WeightCounts:
    """Parameters of one rank: those that it stores, and those that FSDP gathers in and outside layers, padding included."""

    stored: int
    layers: int
    rest: int


class Formula:
    """The closed forms of one spec, at one length of a row."""

    def __init__(self, spec: Model, length: int) -> None:
        self.spec, self.length = spec, length
        self.learned = [d for d in declared(spec) if d.weight.learned]
        work = account(spec, length).flops_per_token
        self.flops_per_token = work["matmul"] + work["attention_causal"]
        self.shapes, self.outputs = functools.cache(self._shapes), functools.cache(self._outputs)

    def _shapes(self, tensor: int) -> list[tuple[Declared, tuple[int, ...]]]:
        """Every weight with the shape of what one tensor-parallel rank stores of it."""
        regions = list(tp_regions(self.spec)) if tensor > 1 else []
        return [(d, _of_tensor_rank(d, cut, tensor)) for d, _, cut in placed(self.learned, regions, tensor)]

    def _outputs(self, tensor: int) -> int:
        """The values per token that the matrices of all layers give on one tensor-parallel rank."""
        return sum(
            prod(shape) // max(1, d.weight.shape(d.scope)[-1])
            for d, shape in self.shapes(tensor)
            if d.weight.matmul and d.weight.out and d.path.startswith("layers.")
        )

    def weights(self, layout: Layout) -> WeightCounts:
        """Return the parameters of rank 0. Raise SpecError, with its path, for a weight that tensor parallelism cannot cut."""
        shards = layout.shards * layout.sequence
        stored = layers = rest = 0
        for d, shape in self.shapes(layout.tensor):
            stored += prod(local_slice.stop - local_slice.start for local_slice in local_slices(shape, None, data=(0, shards)))
            padded = -(-shape[0] // shards) * shards * prod(shape[1:]) if shape else 1
            if d.path.startswith("layers."):
                layers += padded
            else:
                rest += padded
        return WeightCounts(stored, layers, rest)

    def activation_bytes(self, layout: Layout, setting: Setting) -> float:
        """Return about the bytes of activations that the layers of one micro-batch keep."""
        tokens, size = setting.rows * setting.length / layout.sequence, BYTES[setting.precision]
        width = self.spec.width * len(self.spec.layers)
        if setting.recompute == "blocks":
            return tokens * size * width
        return tokens * size * KEPT[setting.recompute] * (1.7 * self.outputs(layout.tensor) + 7 * width)

    def least_memory(self, weights: WeightCounts, layout: Layout, setting: Setting) -> float:
        """Return about the bytes without which no step runs: weights, gradients, optimizer state, and activations of all
        micro-batches that are in a stage at once."""
        in_flight = min(layout.pipeline, setting.micro_batches)
        gathered = 0 if layout.pipeline == 1 else (4 + BYTES[setting.precision]) * weights.layers  # and whole gradients
        return (STATE * weights.stored + gathered + in_flight * self.activation_bytes(layout, setting)) / layout.pipeline

    def about_seconds(self, weights: WeightCounts, layout: Layout, setting: Setting, device: Device) -> float:
        """Return about the seconds of a step: products or FSDP's links, whichever take longer, and tensor parallelism's."""
        passes = 4 if setting.recompute == "blocks" else 3
        tokens = setting.micro_batches * setting.rows * setting.length / layout.sequence
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[setting.precision]
        speed = device.peak(dtype) * device.efficiency.products
        compute = UNFUSED * passes * tokens * self.flops_per_token / layout.tensor / layout.pipeline / speed
        link = device.efficiency.links * (device.between if layout.ranks > device.node else device.within)
        moved = sum(fsdp_bytes(weights, layout, setting)) / layout.pipeline / link
        reduced = 0.0
        if layout.tensor > 1:
            once = tokens * self.spec.width * BYTES[setting.precision] * 2  # an all-reduce sends its bytes twice
            near = device.within if layout.tensor <= device.node else device.between
            reduced = once * (passes + 1) * len(self.spec.layers) / layout.pipeline / (near * device.efficiency.links)
        return (max(compute, moved) + reduced) * (1 + (layout.pipeline - 1) / setting.micro_batches)


def _of_tensor_rank(d: Declared, cut: Cut | None, tensor: int) -> tuple[int, ...]:
    """The shape of what one tensor-parallel rank stores of a weight; with fewer pieces than ranks, that of all of it."""
    shape = d.weight.shape(d.scope)
    if cut is None or cut.pieces != tensor:
        return shape
    return tuple(local_slice.stop - local_slice.start for local_slice in local_slices(shape, cut, (0, tensor)))


def fsdp_bytes(weights: WeightCounts, layout: Layout, setting: Setting) -> tuple[int, int]:
    """Return the bytes of all-gathers and of reduce-scatters per step, as if one stage had all layers. A pipeline keeps weights
    after the first backward pass, and reduces gradients after the last."""
    if layout.shards * layout.sequence == 1:
        return 0, 0
    size, count = BYTES[setting.precision], setting.micro_batches
    if layout.pipeline > 1:
        return size * ((count + 1) * weights.layers + weights.rest), 4 * (weights.layers + weights.rest)
    return count * size * (2 * weights.layers + weights.rest), count * 4 * (weights.layers + weights.rest)
