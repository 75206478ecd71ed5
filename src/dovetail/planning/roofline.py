"""Step time by roofline: each kernel takes as long as its FLOPs or its bytes, whichever is longer; links carry collectives.

    product       max(FLOPs / peak, bytes / bandwidth)             other kernels    bytes / bandwidth
    collective    B bytes over n ranks, sent per rank              all-gather, reduce-scatter B·(n − 1)/n, all-reduce twice that
                  over m nodes with g ranks each                   within B·(g − 1)/g, between B·(m − 1)/m/g, at the same time

    pass = compute + collectives of tensor and sequence + what compute does not hide of those of weights and gradients

Peaks are multiplied by the device's efficiency. Williams et al. 2009 (roofline); Thakur et al. 2005 (collectives).
"""

from __future__ import annotations

import dataclasses as dc
from typing import NamedTuple

from dovetail.parallel.layout import Layout
from dovetail.planning.cost import Collective, RankGroup, StepCost, Traffic
from dovetail.planning.device import Device

OVER_RANKS = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}  # how often the bytes cross the ring


class Links(NamedTuple):
    """Bytes that one rank sends: to ranks of its node, and to other nodes."""

    within: float
    between: float


@dc.dataclass(frozen=True)
class Seconds:
    """Where the time of a step goes; `hidden` communication runs during compute and is not part of the total."""

    compute: float
    exposed: float
    hidden: float
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """The step time."""
        return self.compute + self.exposed + self.bubble


def links(collective: Collective, size: float, per_node: int) -> Links:
    """Return the bytes that one rank sends for tensors of `size` bytes."""
    kind, group = collective
    times, nodes, here = OVER_RANKS.get(kind, 0), group.nodes(per_node), group.on_node(per_node)
    if kind == "receive":  # counted where it is sent
        return Links(0.0, 0.0)
    if not times:  # broadcast, send
        return Links(size, 0.0) if nodes == 1 else Links(0.0, size)
    return Links(times * size * (here - 1) / here, times * size * (nodes - 1) / nodes / here)


def link_bytes(cost: StepCost, per_node: int) -> Links:
    """Return the bytes that one rank sends in all collectives."""
    found = [links(collective, traffic.bytes, per_node) for collective, traffic in cost.traffic.items()]
    return Links(sum(one.within for one in found), sum(one.between for one in found))


def compute_seconds(cost: StepCost, device: Device) -> float:
    """Return the seconds of all kernels, one after another."""
    speed, bandwidth = device.efficiency.products, device.bandwidth * device.efficiency.bandwidth
    products = sum(
        count * max(one.flops / (device.peak(one.dtype) * speed), one.bytes / bandwidth) for one, count in cost.products.items()
    )
    return products + cost.moved / bandwidth + device.kernel * (cost.kernels + cost.products.total())


def collective_seconds(collective: Collective, traffic: Traffic, device: Device) -> float:
    """Return the seconds of the calls of a collective."""
    sent, reached = links(collective, traffic.bytes, device.node), device.efficiency.links
    latency = device.latency.within if collective.group.nodes(device.node) == 1 else device.latency.between
    return max(sent.within / device.within, sent.between / device.between) / reached + traffic.calls * latency


def step_seconds(cost: StepCost, layout: Layout, device: Device, overlap: float = 1.0) -> Seconds:
    """Return the time of a step without a pipeline. Collectives over the ranks that share weights run during compute, as far as
    the fraction `overlap` of compute hides them."""
    compute, waiting, hideable = compute_seconds(cost, device), 0.0, 0.0
    for collective, traffic in cost.traffic.items():
        seconds = collective_seconds(collective, traffic, device)
        if is_of_weights(collective.group, layout):
            hideable += seconds
        else:
            waiting += seconds
    hidden = min(hideable, overlap * compute)
    return Seconds(compute, waiting + hideable - hidden, hidden)


def is_of_weights(group: RankGroup, layout: Layout) -> bool:
    """Whether these ranks share weights or average gradients, and not activations."""
    shared = layout.shards * layout.sequence
    of_shards, of_replicas = RankGroup(shared, layout.tensor), RankGroup(layout.replicas, shared * layout.tensor)
    return group.ranks > 1 and group in (of_shards, of_replicas)
