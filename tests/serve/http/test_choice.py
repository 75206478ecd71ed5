"""One choice of an answer, token by token: stop strings, the fewest tokens, and the times between outputs."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dovetail.serving.http.choice import Choice
from dovetail.serving.http.metrics import Clock
from dovetail.serving.request import Output

LETTERS = st.text("ab", max_size=3)


class Texts:
    """A stream whose token i has the text texts[i]."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def push(self, token: int) -> str:
        return self.texts[token]

    def end(self) -> str:
        return ""


@given(
    st.lists(LETTERS, min_size=1, max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=2), st.integers(0, 5)
)
@settings(max_examples=400, deadline=None)
def test_a_stop_string_is_looked_for_behind_the_fewest_tokens(texts: list[str], stops: list[str], fewest: int) -> None:
    stream: Any = Texts(texts)
    choice, shown = Choice(0, stream, stops=stops, min_tokens=fewest), ""
    for token in range(len(texts)):
        last = token == len(texts) - 1
        piece = choice.push(Output(id="1", tokens=(token,), finish="length" if last else None))
        shown += "" if piece is None else piece.text
    free, rest, places = "".join(texts[:fewest]), "", list[int]()
    for text in texts[fewest:]:  # the first that is complete ends the answer, though a longer one may begin before it
        rest += text
        places = places or [rest.find(stop) for stop in stops if stop in rest]
    assert shown == free + rest[: min(places, default=len(rest))]
    assert choice.finish == ("stop" if places else "length")


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 2)), max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_times_of_an_answer_add_up(outputs: list[tuple[float, int]]) -> None:
    seen: dict[str, list[float]] = {}
    names = ("first", "between", "decode", "whole")
    metrics: Any = SimpleNamespace(
        **{name: SimpleNamespace(observe=seen.setdefault(name, []).append) for name in names}, ended=lambda _: None
    )
    now = itertools.accumulate((seconds for seconds, _ in outputs), initial=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: moment)
        moment = next(now)
        clock = Clock(metrics)
        for moment, (_, tokens) in zip(now, outputs, strict=True):  # noqa: B007 (read by perf_counter)
            clock.tick(tokens)
        clock.end(["stop"])
    ticks = sum(tokens > 0 for _, tokens in outputs)
    assert (len(seen["first"]), len(seen["between"])) == (min(ticks, 1), max(ticks - 1, 0))
    assert sum(seen["between"]) == pytest.approx(sum(seen["decode"]))
    assert seen["whole"][0] >= sum(seen["first"]) + sum(seen["between"]) - 1e-9
