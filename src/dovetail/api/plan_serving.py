"""plan_serving: requests per second and memory of a model on a device, and the replicas that some users need."""

from __future__ import annotations

import dataclasses as dc
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.arguments import Changes, SpecLike, read_spec
from dovetail.api.options import DEVICE, PRICE, SET, SPEC, SWAP, TENSOR, Count, Length, NewTokens
from dovetail.api.result import Result
from dovetail.core.errors import SpecError, UsageError, names_or_nearest
from dovetail.core.fold import parameters
from dovetail.core.option import Option
from dovetail.core.units import count, read_count, size
from dovetail.planning.device import Device, device_named
from dovetail.views.blocks import Cell, TextTable, View, styled

if TYPE_CHECKING:
    from dovetail.model import Model
    from dovetail.planning.serving import Capacity, Load, Refused, Replica

GAP = 0.05  # seconds between two tokens: 20 per second, faster than people read
HEADS = ("GPUs", "rows", "weights", "state of a row", "first token", "next token", "requests/s", "tokens/s", "limit")
ACTIVE, REQUESTS = 0.1, 6.0  # of all users in the busiest hour, and requests of each in it


@dc.dataclass(frozen=True, repr=False)
class ServingPlan(Result):
    """Replicas of a model on a device, by their number of ranks, and what some users need of the best."""

    name: str
    spec: Model
    device: Device
    load: Load
    replicas: tuple[Replica, ...]
    refused: tuple[Refused, ...]
    capacity: Capacity | None

    @property
    def best(self) -> Replica | None:
        """The replica with the most requests per second and GPU."""
        return max(self.replicas, key=lambda one: one.requests(self.load) / one.tensor, default=None)

    @property
    def failed(self) -> bool:
        return self.best is None

    def to_dict(self) -> dict[str, Any]:
        from dovetail.planning.serving import assumptions

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
            "replicas": [data(one) for one in self.replicas],
            "refused": [dc.asdict(one) for one in self.refused],
            "capacity": None if self.capacity is None else dc.asdict(self.capacity),
            "assumptions": list(assumptions(self.device, self.load)),
        }

    def view(self, width: int) -> View:
        from dovetail.planning.serving import assumptions

        load, best = self.load, self.best
        stored = f"weights {load.weights}, cache {load.cache}"
        lines = [
            styled((self.name, "bold"), f"   {count(parameters(self.spec))} parameters on {self.device.name}"),
            styled((f"requests of {load.prompt:,} + {load.answer:,} tokens; {stored}", "dim")),
            "",
            TextTable(HEADS, [_cells(one, load, one is best) for one in self.replicas], right=HEADS[:-1])
            if self.replicas
            else styled(("no replica fits; use more ranks, fewer bits, or more memory", "yellow")),
            *(styled((f"{one.tensor} GPUs: {one.reason}", "dim")) for one in self.refused),
        ]
        if self.capacity is not None:
            lines += ["", styled((_need(self.capacity), "bold"))]
        return [*lines, "", *(styled(("assumed  ", "dim"), line) for line in assumptions(self.device, load))]


def _cells(one: Replica, load: Load, best: bool) -> list[Cell]:
    """A row of the table, by HEADS."""
    sizes = f"{one.tensor}", f"{one.rows:,}", size(round(one.weights)), size(round(one.state))
    times = f"{1000 * one.prefill:,.0f} ms", f"{1000 * one.step:,.1f} ms"
    cells = *sizes, *times, f"{one.requests(load):,.2f}", f"{one.tokens(load):,.0f}", one.limit
    return [styled((cell, "bold cyan" if best else "")) for cell in cells]


def _need(need: Capacity) -> str:
    hour, million = need.dollars_per_hour, need.dollars_per_million_tokens
    rate = f"{need.requests:,.1f} requests/s at the peak"
    text = f"{count(need.users)} users: {rate}, {need.replicas:,} replicas, {need.gpus:,} GPUs"
    if hour is None or million is None:
        return text
    return f"{text}, ${hour:,.0f} per hour, ${million:,.2f} per million tokens at the peak"


def plan_serving(
    spec: Annotated[SpecLike, SPEC],
    *,
    device: Annotated[str, DEVICE] = "h100",
    tensor: Annotated[int | None, TENSOR] = None,
    prompt: Annotated[int, Length("--serve: tokens of a prompt.")] = 1024,
    answer: Annotated[int, NewTokens("--serve: tokens of an answer.")] = 256,
    weights: Annotated[Literal["fp32", "bf16", "fp8", "int8", "int4"], Option("--serve: how matrices are stored.")] = "bf16",
    cache: Annotated[Literal["fp32", "bf16", "fp8", "int8", "int4"], Option("--serve: how the KV cache is stored.")] = "bf16",
    gap: Annotated[
        float,
        Option(
            "--serve: the longest time between two tokens of a request, in seconds.",
            low=0.0,
            high=3600.0,
            above=True,
        ),
    ] = GAP,
    users: Annotated[float | str | None, Count("--serve: the users to serve: 1M.")] = None,
    active: Annotated[
        float, Option("--serve: the share of the users in the busiest hour.", low=0.0, high=1.0, above=True)
    ] = ACTIVE,
    requests: Annotated[
        float,
        Option("--serve: requests that each of these sends in that hour.", low=0.0, high=1000000.0, above=True),
    ] = REQUESTS,
    price: Annotated[float | None, PRICE] = None,
    set: Annotated[Changes, SET] = (),
    swap: Annotated[Changes, SWAP] = (),
) -> ServingPlan:
    """Plan the serving of a model: sequences that fit, seconds of a prompt and of a step, requests per second, by roofline.

    `prompt` and `answer` are the tokens of a request. `weights` and `cache` say in how many bits matrices and KV cache
    are stored; `gap` is the longest time between two tokens of a request, which bounds how many run at once. Replicas are
    tensor-parallel over 1, 2, 4 … GPUs of a node, or over `tensor`. With `users` (1e6 or "1M"), of whom the share `active`
    send `requests` requests each in the busiest hour, the result has the replicas and GPUs that they need, and with a `price`
    in dollars per GPU-hour their cost. All figures are upper bounds; `to_dict()["assumptions"]` says on what they rest.
    """
    from dovetail.account import longest_length
    from dovetail.core.check import check
    from dovetail.decoding.generation import check_generates
    from dovetail.planning.serving import BYTES, Load, capacity, replicas

    for flag, value in {"weights": weights, "cache": cache}.items():
        if value not in BYTES:
            raise UsageError(f"--{flag}: {value!r} is unknown; {names_or_nearest(value, BYTES, 'forms')}")
    name, changed, _ = read_spec(spec).after(set, swap)
    check(changed)
    check_generates(changed)
    longest = longest_length(changed)
    if longest is not None and prompt + answer > longest:
        raise SpecError("--prompt", f"{prompt} + {answer} tokens are more than {longest}, the longest sequence of the model")
    kind, load = device_named(device), Load(prompt, answer, weights, cache, gap)
    found, refused = replicas(changed, kind, load, tensor)
    made = ServingPlan(name, changed, kind, load, tuple(found), tuple(refused), None)
    if users is None or made.best is None:
        return made
    return dc.replace(made, capacity=capacity(made.best, load, read_count(users), active, requests, price))
