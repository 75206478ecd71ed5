"""plan_serving: requests per second and memory of a model on a device, and the replicas that some users need."""

from __future__ import annotations

import dataclasses as dc
from typing import TYPE_CHECKING, Annotated, Literal

from dovetail.api.arguments import Changes, SpecLike, read_spec
from dovetail.api.options import DEVICE, PRICE, SET, SPEC, SWAP, TENSOR, Count, Length, NewTokens
from dovetail.base.errors import SpecError, UsageError, names_or_nearest
from dovetail.base.option import Option
from dovetail.base.units import read_count
from dovetail.planning.device import device_named

if TYPE_CHECKING:
    from dovetail.api.plans import ServingPlan

GAP = 0.05  # seconds between two tokens: 20 per second, faster than people read
ACTIVE, REQUESTS = 0.1, 6.0  # of all users in the busiest hour, and requests of each in it


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
    from dovetail.api.plans import ServingPlan
    from dovetail.decoding.generation import check_generates
    from dovetail.planning.serving import BYTES, Load, capacity, replicas
    from dovetail.spec.check import check

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
