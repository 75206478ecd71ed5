"""The backbone rule: whoever reads Llama's forward pass needs four files; every other file it enters is a leaf.

A profiler watches a real forward. Of our files outside base/, spec/, nn/ and state/, only the four may call into others of
ours; a call that goes through torch (a module's `__call__`) or through nn/ (tensors cached per step) counts for the calling
file. nn/block.py is one of the four: it runs the branches of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import dovetail
from dovetail.files.spec import load_spec
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.state.pool import Pool

ROOT = Path(dovetail.__file__).parent
BACKBONE = {"model/model.py", "nn/block.py", "parts/mixer/attention.py", "ops/attend.py"}
DOOR = {"model/transformer.py"}  # makes a Ctx from plain arguments, then calls the backbone, which never calls it
GROUND = ("base/", "spec/", "nn/", "state/")  # what everything stands on
MOST = 12  # files of ours that a forward enters


def ours(frame: FrameType) -> str | None:
    """The file of a frame, relative to the package; None where it is not ours or belongs to the ground."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return None if name.startswith(GROUND) and name not in BACKBONE else name


def callers(frame: FrameType) -> Iterator[str]:
    """Our files above a frame, the nearest first."""
    above = frame.f_back
    while above is not None:
        if name := ours(above):
            yield name
        above = above.f_back


def watch(run: Callable[[], Any]) -> tuple[set[str], set[tuple[str, str]]]:
    """(files entered, (caller, called) between different files) of a run."""
    entered: set[str] = set()
    calls: set[tuple[str, str]] = set()

    def hear(frame: FrameType, event: str, _: Any) -> None:
        called = ours(frame) if event == "call" else None
        if called is not None:
            entered.add(called)
            caller = next(callers(frame), called)
            if caller != called:
                calls.add((caller, called))

    sys.setprofile(hear)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered, calls


def forward() -> Callable[[], Any]:
    """A whole pass over two sequences."""
    spec = load_spec("llama-tiny")
    model, tokens = build(spec), torch.arange(18).reshape(2, 9)
    return lambda: model(tokens, Ctx(layout=TokenLayout.whole(2, 9)))


def step() -> Callable[[], Any]:
    """One decode step of two cached sequences."""
    spec = load_spec("llama-tiny")
    model, tokens, pool = build(spec), torch.arange(18).reshape(2, 9), Pool(spec, 2, 16)

    def feed(new: torch.Tensor) -> torch.Tensor:
        taken = pool.step([0, 1], [new.shape[1]] * 2)
        return model(new, Ctx(layout=taken.layout, views=taken.views))

    feed(tokens)
    return lambda: feed(tokens[:, :1])


@pytest.mark.parametrize("make", [forward, step])
def test_four_files_are_the_backbone(make: Callable[[], Callable[[], Any]]) -> None:
    entered, calls = watch(make())
    astray = sorted((caller, called) for caller, called in calls if caller not in BACKBONE | DOOR)
    assert not [pair for pair in calls if pair[1] in DOOR and pair[0] in BACKBONE]
    assert not astray, f"leaves that call into others: {astray}"
    assert {caller for caller, _ in calls} - DOOR == BACKBONE
    assert entered >= {*BACKBONE, "parts/norm.py", "parts/position/rope.py", "parts/ffn/dense.py"}  # the profiler saw it all
    assert len(entered - DOOR) <= MOST, sorted(entered)


def test_the_profiler_sees_a_leaf_that_calls_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.parts import norm
    from dovetail.parts.act import Relu2

    whole = norm.RMSNormModule.forward
    code = compile("def forward(self, x, ctx):\n    act.function(x)\n    return whole(self, x, ctx)", norm.__file__, "exec")
    scope: dict[str, Any] = {"whole": whole, "act": Relu2()}
    exec(code, scope)
    monkeypatch.setattr(norm.RMSNormModule, "forward", scope["forward"])
    assert ("parts/norm.py", "parts/act.py") in watch(forward())[1]
