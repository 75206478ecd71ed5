"""Adapters of the engine by name: rows of one batch with different ones, loads and unloads beside requests that run."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.base.limits import SERVED_ADAPTERS
from dovetail.decoding.generation import generate_tokens
from dovetail.files.spec import load_spec
from dovetail.model.model import Model, ModelModule
from dovetail.proof.laws.adapted import perturb
from dovetail.proof.laws.case import perturbed
from dovetail.proof.laws.mutant import spec
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.weights.adapters.attach import attach, detach
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.storage import adapter_tensors

START = (1,)
SMALL = "small"
KINDS = {"low": Lora(rank=2), "high": Lora(rank=5, alpha=8.0, targets=("linear", "head.out"))}


def spec_of(preset: str) -> Model:
    """The preset with a head of its own: an adapter of the head sees other rows than those of the layers."""
    return (spec() if preset == SMALL else load_spec(preset)).set("head.tied", False)


@cache
def made(preset: str) -> tuple[ModelModule, dict[str, dict[str, Tensor]]]:
    """A model, and the tensors of two adapters."""
    model = perturbed(spec_of(preset), 0).eval()
    tensors = {}
    for i, (name, kind) in enumerate(KINDS.items()):
        attach(model, kind)
        perturb(model, i)
        tensors[name] = {path: tensor.clone() for path, tensor in adapter_tensors(model).items()}
        detach(model)
    return model, tensors


def alone(preset: str, request: Request) -> list[int]:
    """The tokens of a request on the model with the adapter attached, without the engine."""
    model, tensors = made(preset)
    if request.adapter is not None:
        attach(model, KINDS[request.adapter])
        for path, tensor in adapter_tensors(model).items():
            tensor.copy_(tensors[request.adapter][path])
    try:
        return list(generate_tokens(model, torch.tensor(request.prompt), request.max_tokens, start=START))
    finally:
        detach(model)


def request(id: str, rng: random.Random, vocab: int, adapter: str | None, prefix: tuple[int, ...] = ()) -> Request:
    own = tuple(rng.randrange(4, vocab) for _ in range(rng.randrange(3, 20)))
    return Request(id=id, prompt=(*prefix, *own), max_tokens=rng.randrange(2, 9), adapter=adapter)


def unload(engine: Engine) -> None:
    """Leave the model as it was, for the next test."""
    for name in list(engine.adapters.slots):
        engine.unload_adapter(name)


def run(engine: Engine) -> dict[str, list[int]]:
    return joined([output for _ in iter(lambda: engine.busy, False) for output in engine.step()])


def joined(outputs: list[Output]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.id, []).extend(output.tokens)
    return tokens


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "preset",
    [
        "llama-tiny",
        "mixtral-tiny",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-tiny", "jamba-tiny", "gpt2-tiny", "t5-tiny")),
    ],
)
def test_requests_with_different_adapters_run_in_one_batch(preset: str) -> None:
    model, tensors = made(preset)
    rng, vocab = random.Random(3), model.part.vocab
    names = [None, "low", "high"]
    prefix = tuple(rng.randrange(4, vocab) for _ in range(40))  # a cached prefix of one adapter is not another's
    requests = [request(str(i), rng, vocab, names[i % 3], prefix if i % 2 else ()) for i in range(9)]
    want = {one.id: alone(preset, one) for one in requests}
    engine = Engine(model, rows=4, longest=128, budget=24, start=START)
    try:
        for name, kind in KINDS.items():
            engine.load_adapter(name, kind, tensors[name])
        for one in requests:
            engine.add(one)
        assert run(engine) == want
    finally:
        unload(engine)
    assert len({tuple(want[str(i)]) for i in range(9)}) > 5  # the adapters change something


@pytest.mark.parametrize("loads", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_loads_and_unloads_change_no_token_of_the_base(loads: int) -> None:
    model, tensors = made(SMALL)
    rng, vocab = random.Random(5), model.part.vocab
    want: dict[str, list[int]] = {}
    engine, outputs = Engine(model, rows=4, longest=96, start=START), list[Output]()
    try:
        for i in range(loads):
            name, kind = ("low", "high")[i % 2], f"adapter-{i % 3}"
            engine.load_adapter(kind, KINDS[name], tensors[name])
            one = request(str(i), rng, vocab, None)
            want[one.id] = alone_of_base(one)
            engine.add(one)
            if i % 5 == 0:  # one that runs with the adapter while it is unloaded, and while its name is loaded again
                other = request(f"{i} {name}", rng, vocab, kind)
                want[other.id] = alone_with(SMALL, other, name)
                engine.add(other)
            outputs += engine.step()
            engine.unload_adapter(kind)
        while engine.busy:
            outputs += engine.step()
        assert engine.adapters.bank is not None
        assert not engine.adapters.bank.loaded
    finally:
        unload(engine)
    assert joined(outputs) == want


def alone_of_base(one: Request) -> list[int]:
    return list(generate_tokens(base(), torch.tensor(one.prompt), one.max_tokens))


@cache
def base() -> ModelModule:
    return perturbed(spec_of(SMALL), 0).eval()


def alone_with(preset: str, one: Request, name: str) -> list[int]:
    model, (_, tensors) = base(), made(preset)
    attach(model, KINDS[name])
    for path, tensor in adapter_tensors(model).items():
        tensor.copy_(tensors[name][path])
    try:
        return list(generate_tokens(model, torch.tensor(one.prompt), one.max_tokens))
    finally:
        detach(model)


def test_what_cannot_be_loaded_is_refused() -> None:
    model, tensors = made(SMALL)
    engine = Engine(model, rows=2, longest=64)
    try:
        with pytest.raises(InputError, match="'high' is not loaded; adapters: none"):
            engine.add(Request(id="a", prompt=(5, 6), max_tokens=2, adapter="high"))
        engine.load_adapter("high", KINDS["high"], tensors["high"])
        with pytest.raises(InputError, match="loaded already"):
            engine.load_adapter("high", KINDS["low"], tensors["low"])
        with pytest.raises(InputError, match="did you mean high"):
            engine.unload_adapter("hihg")
        for i in range(1, SERVED_ADAPTERS):
            engine.load_adapter(str(i), KINDS["low"], tensors["low"])
        with pytest.raises(InputError, match=f"{SERVED_ADAPTERS} are loaded"):
            engine.load_adapter("more", KINDS["low"], tensors["low"])
    finally:
        unload(engine)
    attach(model, KINDS["low"])
    try:
        with pytest.raises(InputError, match="an adapter of its own"):
            Engine(model, rows=2, longest=64).load_adapter("low", KINDS["low"], tensors["low"])
    finally:
        detach(model)
