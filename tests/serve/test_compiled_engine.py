"""The engine with compiled decoding: the tokens of eager decoding, from one graph for all loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.files.spec import load_spec
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.proof.laws.case import perturbed
from dovetail.serving import compiled
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request

ROWS = 4


def model_of(name: str) -> ModelModule:
    return perturbed(load_spec(name), 0).eval()


class Captured:
    """The step as captured graphs that run unchanged and are counted: inductor's kernels are law 11's."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.graphs = self.runs = 0

    def compile_step(self, model: ModelModule) -> Callable[[Tensor, Ctx], Tensor]:
        return torch.compile(lambda tokens, ctx: model.next_logits(tokens, ctx), fullgraph=True, backend=self.backend)

    def backend(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


def requests() -> list[Request]:
    """More than there are rows, of lengths that cross the edges of pages."""
    sizes = [(3, 20), (17, 9), (30, 5), (6, 30), (16, 16), (2, 12), (40, 3), (11, 25)]
    return [
        Request(id=str(i), prompt=tuple(3 + (i * 7 + j * j) % 50 for j in range(n)), max_tokens=new)
        for i, (n, new) in enumerate(sizes)
    ]


def tokens(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for request in requests():
        engine.add(request)
    while engine.busy:
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.tokens)
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows decode in each call of the graph."""
    seen, run = list[int](), compiled.CompiledStep.__call__
    monkeypatch.setattr(compiled.CompiledStep, "__call__", lambda self, rows: (seen.append(len(rows)), run(self, rows))[1])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gemma-2-tiny"])
def test_tokens_are_those_of_eager_decoding(name: str, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, captured = model_of(name), Captured()
    monkeypatch.setattr(compiled, "compile_step", captured.compile_step)
    engine = Engine(model, rows=ROWS, longest=64, compiled=model_of(name))
    graphs, before = captured.graphs, captured.runs
    assert tokens(engine) == tokens(Engine(model, rows=ROWS, longest=64))
    assert len(runs) > 20
    assert set(runs) >= {2, 3, 4}  # rows that decode
    assert captured.graphs == graphs  # nothing is compiled while requests wait
    assert captured.runs - before == len(runs)  # and no step is eager for the lack of a graph


@pytest.mark.slow
def test_one_row_decodes_by_the_graph(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, captured = model_of("llama-tiny"), Captured()
    monkeypatch.setattr(compiled, "compile_step", captured.compile_step)
    engine = Engine(model, rows=1, longest=64, compiled=model_of("llama-tiny"))
    graphs, before = captured.graphs, captured.runs
    assert tokens(engine) == tokens(Engine(model, rows=1, longest=64))
    assert len(runs) > 50
    assert captured.graphs == graphs
    assert captured.runs - before == len(runs)


@pytest.mark.parametrize("sizes", [{"longest": 10}, {"longest": 64, "pages": 1}])
def test_a_cache_without_room_for_the_graph_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="its graph is made with 11 tokens, and a row has room for"):
        Engine(model_of("llama-tiny"), rows=2, compiled=model_of("llama-tiny"), **sizes)


@pytest.mark.slow
def test_few_pages_are_enough_for_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_step", Captured().compile_step)
    Engine(model_of("llama-tiny"), rows=ROWS, longest=32, pages=2, compiled=model_of("llama-tiny"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own packed matrices
def test_tokens_of_the_compiled_kernels_are_those_of_eager_decoding(runs: list[int]) -> None:
    model = model_of("llama-tiny")
    engine = Engine(model, rows=ROWS, longest=64, compiled=model_of("llama-tiny"))
    assert tokens(engine) == tokens(Engine(model, rows=ROWS, longest=64))
    assert len(runs) > 20


def test_a_recurrent_state_is_refused() -> None:
    with pytest.raises(InputError, match="compiled: only models whose decode state is a KV cache"):
        Engine(model_of("mamba2-tiny"), rows=2, longest=64, compiled=model_of("mamba2-tiny"))
