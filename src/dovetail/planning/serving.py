"""Serving by roofline: how many sequences a replica holds, how many requests it answers per second, and what some users need.

    weights     bytes of all weights; a step reads those that tokens are multiplied by, of experts the ones that are routed to
    state(n)    bytes of KV cache and recurrent state of a sequence of n tokens, as the parts declare them
    rows        (memory of the ranks − weights) / state(prompt + answer/2), or fewer, so that a step takes at most `gap` seconds
    step        max((weights + rows · state) / bandwidth, rows · FLOPs of a token / peak) + two all-reduces per layer
    prefill     FLOPs of the prompt / peak
    requests/s  1 / (prefill + answer · step / rows)             each request takes its prefill, and its share of the steps

What a plan says (`ServingReport`): the replicas by their number of ranks, the best of them, and what some users need.
These are upper bounds of a real engine: no scheduler, no kernel overhead, no waiting. Pope et al. 2022 (inference by roofline).
"""

from __future__ import annotations

import dataclasses as dc
import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal

from dovetail.account import value_bytes
from dovetail.base.errors import SpecError
from dovetail.model.model import Model
from dovetail.parallel.layout import Layout
from dovetail.planning.device import Device
from dovetail.planning.formula import Formula
from dovetail.spec.fold import attention_flops, declared, matmul_flops, parameters, states
from dovetail.spec.weight import State, Weight

Stored = Literal["fp32", "bf16", "fp8", "int8", "int4"]
BYTES: dict[Stored, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
PRODUCTS: dict[Stored, str] = {"fp32": "float32"}  # the dtype that products are computed in; bfloat16 for all others
HEADROOM = 0.7  # of a replica's requests per second that is planned for: above it, queues grow without end
MOST_ROWS = 4096


@dc.dataclass(frozen=True)
class Load:
    """What is served: tokens of a request, and in how many bits weights and cache are stored."""

    prompt: int
    answer: int
    weights: Stored
    cache: Stored
    gap: float  # seconds between two tokens of a request at the most


@dc.dataclass(frozen=True)
class Replica:
    """One copy of the model on some ranks, at the number of sequences that it runs best with."""

    tensor: int
    rows: int
    weights: float  # bytes of all ranks
    state: float  # bytes of a sequence in the middle of its answer
    step: float  # seconds
    prefill: float  # seconds of a prompt alone
    limit: str  # what bounds the rows or the step

    def requests(self, load: Load) -> float:
        """Requests per second."""
        return 1.0 / (self.prefill + load.answer * self.step / self.rows)

    def tokens(self, load: Load) -> float:
        """Generated tokens per second."""
        return load.answer * self.requests(load)


@dc.dataclass(frozen=True)
class RefusedRanks:
    """A number of ranks that cannot hold or share the model, and why."""

    tensor: int
    reason: str


def replicas(spec: Model, device: Device, load: Load, tensor: int | None) -> tuple[list[Replica], list[RefusedRanks]]:
    """A replica for each number of tensor-parallel ranks within a node, by powers of two, or for the one that is given."""
    found, refused = list[Replica](), list[RefusedRanks]()
    sizes = [tensor] if tensor is not None else [2**i for i in range(device.node.bit_length()) if 2**i <= device.node]
    formula = Formula(spec, load.prompt)
    for ranks in sizes:
        try:
            formula.weights(Layout(tensor=ranks))
            found.append(_replica(spec, device, load, ranks))
        except SpecError as error:
            refused.append(RefusedRanks(ranks, str(error)))
    return found, refused


def _replica(spec: Model, device: Device, load: Load, ranks: int) -> Replica:
    weights, state = weight_bytes(spec, load), state_bytes(spec, load.prompt + load.answer // 2, load.cache)
    free = device.usable * ranks - weights
    most = min(MOST_ROWS, math.floor(free / max(state, 1e-9))) if free > 0 else 0
    if most < 1:
        need, has = (weights + state) / 1e9, device.usable * ranks / 1e9
        raise SpecError("memory", f"weights and one sequence take {need:,.0f} GB of {has:,.0f} on {ranks} ranks", "use more")
    # a step of more rows takes longer: as many as end within the gap, and at least one
    rows = max(1, bisect_right(range(1, most + 1), load.gap, key=lambda n: step_seconds(spec, device, load, ranks, n)[0]))
    step, bound = step_seconds(spec, device, load, ranks, rows)
    limit = bound if rows < most else "memory of the KV cache" if most < MOST_ROWS else bound
    return Replica(ranks, rows, weights, state, step, prefill_seconds(spec, device, load, ranks), limit)


def weight_bytes(spec: Model, load: Load) -> float:
    """Bytes of all weights."""
    return sum(d.size * _each(d.weight, load) for d in declared(spec) if d.weight.learned)


def _each(weight: Weight, load: Load) -> float:
    """Bytes of one value: matrices in the stored form, all else in 16 bits or as many as the matrices."""
    return BYTES[load.weights] if weight.matmul and not weight.readout else max(BYTES[load.weights], BYTES["bf16"])


def read_bytes(spec: Model, load: Load, rows: int) -> float:
    """Bytes of weights that a step of so many tokens reads: all that they are multiplied by; of experts, the expected share."""
    total = 0.0
    for d in declared(spec):
        if d.weight.matmul and not d.scope.drafts:
            met = 1.0 if d.weight.used == Fraction(1) else 1.0 - (1.0 - float(d.weight.used)) ** rows
            total += d.size * _each(d.weight, load) * met
    return total


def state_bytes(spec: Model, n: int, cache: Stored) -> float:
    """Bytes of the decode state of one sequence of n tokens; a state without entries per token keeps the dtype of the model."""
    return float(sum(state.values(scope, n) * _width(state, cache) for _, state, scope in states(spec)))


def _width(state: State, cache: Stored) -> float:
    """Bytes of one value of a state."""
    return value_bytes(state, BYTES[cache] if state.per in ("token", "block") else max(BYTES[cache], BYTES["bf16"]))


def token_flops(spec: Model, n: int) -> float:
    """FLOPs of one more token after n."""
    return matmul_flops(spec) + attention_flops(spec, n + 1)[1] - attention_flops(spec, n)[1]


def step_seconds(spec: Model, device: Device, load: Load, ranks: int, rows: int) -> tuple[float, str]:
    """Seconds of a decoding step, and what bounds it."""
    n = load.prompt + load.answer // 2
    moved = read_bytes(spec, load, rows) + rows * state_bytes(spec, n, load.cache)
    memory = moved / (device.bandwidth * device.efficiency.bandwidth * ranks)
    compute = rows * token_flops(spec, n) / (_peak(device, load) * ranks)
    links = _reduced(spec, device, load, ranks, rows)
    kinds = {"bandwidth of memory": memory, "products": compute}
    bound = max(kinds, key=lambda name: kinds[name])
    return kinds[bound] + links, "links between the ranks" if links > kinds[bound] else bound


def prefill_seconds(spec: Model, device: Device, load: Load, ranks: int) -> float:
    """Seconds of a prompt that is computed alone."""
    flops = load.prompt * matmul_flops(spec) + attention_flops(spec, load.prompt)[1]
    compute = flops / (_peak(device, load) * ranks)
    memory = read_bytes(spec, load, load.prompt) / (device.bandwidth * device.efficiency.bandwidth * ranks)
    return max(compute, memory) + _reduced(spec, device, load, ranks, load.prompt)


def _peak(device: Device, load: Load) -> float:
    return device.peak(PRODUCTS.get(load.weights, "bfloat16")) * device.efficiency.products


def _reduced(spec: Model, device: Device, load: Load, ranks: int, tokens: int) -> float:
    """Seconds of two all-reduces of the residual stream per layer."""
    if ranks == 1:
        return 0.0
    payload = tokens * spec.width * max(BYTES[load.weights], BYTES["bf16"])
    each = device.latency.within + 2 * (ranks - 1) / ranks * payload / (device.within * device.efficiency.links)
    return 2 * len(spec.layers) * each


@dc.dataclass(frozen=True)
class Capacity:
    """What some users need: requests per second at the peak, replicas, GPUs, and dollars."""

    users: float
    requests: float
    replicas: int
    gpus: int
    dollars_per_hour: float | None
    dollars_per_million_tokens: float | None


def capacity(replica: Replica, load: Load, users: float, active: float, each: float, price: float | None) -> Capacity:
    """`active` is the share of users in the busiest hour, each of whom sends `each` requests in it; one replica is spare."""
    requests = users * active * each / 3600
    count = max(1, math.ceil(requests / (HEADROOM * replica.requests(load)))) + 1
    gpus = count * replica.tensor
    dollars = None if price is None else gpus * price
    tokens = requests * load.answer * 3600
    return Capacity(users, requests, count, gpus, dollars, None if dollars is None or not tokens else dollars / tokens * 1e6)


def assumptions(device: Device, load: Load) -> Iterator[str]:
    """What the figures rest on."""
    share = device.efficiency
    peaks = f"{share.products:.0%} of peak FLOP/s, {share.bandwidth:.0%} of memory bandwidth, {share.links:.0%} of links"
    yield f"{device.name}: {peaks}; {device.reserved / 1e9:g} GB are not for tensors"
    yield f"{load.prompt:,} + {load.answer:,} tokens per request, no shared prefix, no speculation, a paged cache without waste"
    yield "upper bounds: no scheduler, no kernel overhead; prefill and decode do not overlap"
    yield f"replicas are planned for {HEADROOM:.0%} of their requests per second, and one is spare"


@dc.dataclass(frozen=True, repr=False)
class ServingReport:
    """Replicas of a model on a device, and the capacity that some users need of the best."""

    name: str
    spec: Model
    device: Device
    load: Load
    replicas: tuple[Replica, ...]
    refused: tuple[RefusedRanks, ...]
    capacity: Capacity | None

    @property
    def best(self) -> Replica | None:
        """The replica with the most requests per second and GPU."""
        return max(self.replicas, key=lambda replica: replica.requests(self.load) / replica.tensor, default=None)

    def data(self) -> dict[str, Any]:
        """The plan as plain data."""

        def data(one: Replica) -> dict[str, Any]:
            return {
                **dc.asdict(one),
                "requests_per_second": one.requests(self.load),
                "tokens_per_second": one.tokens(self.load),
            }

        return {
            "spec": self.name,
            "parameters": parameters(self.spec),
            "device": self.device.name,
            **dc.asdict(self.load),
            "best": None if self.best is None else data(self.best),
            "replicas": [data(replica) for replica in self.replicas],
            "refused": [dc.asdict(one) for one in self.refused],
            "capacity": None if self.capacity is None else dc.asdict(self.capacity),
            "assumptions": list(assumptions(self.device, self.load)),
        }
