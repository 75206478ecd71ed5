"""Step time by roofline, against numbers worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from dovetail.base.errors import UsageError
from dovetail.parallel.layout import Layout
from dovetail.planning.cost import Collective, MatrixProduct, RankGroup, StepCost, Traffic
from dovetail.planning.device import Device, Efficiency, Latency, device_named, devices
from dovetail.planning.roofline import compute_seconds, link_bytes, links, step_seconds

ROUND = Device(
    name="round numbers",
    memory=100.0,
    flops={"bfloat16": 1000.0, "float32": 100.0},
    bandwidth=10.0,
    node=8,
    within=50.0,
    between=5.0,
    latency=Latency(within=1.0, between=2.0),
    reserved=10.0,
    write=1.0,
)


def test_a_product_takes_as_long_as_its_flops_or_its_bytes() -> None:
    by_flops = StepCost(products=Counter({MatrixProduct("bfloat16", 4000, 10): 2}))
    by_bytes = StepCost(products=Counter({MatrixProduct("bfloat16", 40, 70): 1}), kernels=3, moved=30)
    assert compute_seconds(by_flops, ROUND) == 8.0
    assert compute_seconds(by_bytes, ROUND) == 10.0


def test_groups_on_nodes() -> None:
    tensor, data, all_data = RankGroup(8, 1), RankGroup(16, 8), RankGroup(32, 1)
    assert [(one.on_node(8), one.nodes(8)) for one in (tensor, data, all_data)] == [(8, 1), (1, 16), (8, 4)]
    assert (RankGroup(4, 2).on_node(8), RankGroup(8, 2).nodes(8)) == (4, 2)


def test_bytes_on_links() -> None:
    assert links(Collective("all-gather", RankGroup(8, 1)), 80, 8) == (70.0, 0.0)
    assert links(Collective("all-reduce", RankGroup(8, 1)), 80, 8) == (140.0, 0.0)
    assert links(Collective("reduce-scatter", RankGroup(4, 8)), 80, 8) == (0.0, 60.0)
    assert links(Collective("all-gather", RankGroup(32, 1)), 80, 8) == (70.0, 7.5)  # each GPU brings an eighth into its node
    assert links(Collective("send", RankGroup(2, 64)), 80, 8) == (0.0, 80.0)


def test_weights_are_gathered_during_compute_and_activations_are_not() -> None:
    layout = Layout(shards=4, tensor=8)
    cost = StepCost(
        products=Counter({MatrixProduct("bfloat16", 10_000, 1): 1}),
        traffic={
            Collective("all-gather", RankGroup(4, 8)): Traffic(1, 20),  # 15 bytes between nodes: 3 s, and a latency of 2 s
            Collective("all-reduce", RankGroup(8, 1)): Traffic(2, 200),  # 350 bytes within a node: 7 s, and 2 s
        },
    )
    found = step_seconds(cost, layout, ROUND)
    assert (found.compute, found.exposed, found.hidden, found.total) == (10.0, 9.0, 5.0, 19.0)
    assert step_seconds(cost, layout, ROUND, overlap=0.0).total == 24.0
    assert link_bytes(cost, 8) == (350.0, 15.0)


def test_efficiency_scales_every_peak() -> None:
    half = Device(**{**vars(ROUND), "efficiency": Efficiency(0.5, 0.5, 0.5)})
    cost = StepCost(products=Counter({MatrixProduct("bfloat16", 1000, 1): 1}), moved=10)
    assert compute_seconds(cost, half) == 2 * compute_seconds(cost, ROUND) == 4.0


def test_the_table_of_devices() -> None:
    assert {"a100", "h100", "h200", "b200", "mi300x"} <= set(devices())
    for device in devices().values():
        assert device.flops["bfloat16"] > device.flops["float32"] > 1e12
        assert device.within > device.between > 1e9
        assert 0 < device.reserved < 0.1 * device.memory
    with pytest.raises(UsageError, match=r"--device: 'h1000' is not known; .*h100"):
        device_named("h1000")
