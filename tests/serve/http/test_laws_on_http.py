"""The laws on servers, on our own HTTP interface over a real model: the engine of the tests has no prefix cache.

Its tokens are those of ASCII text: the law on stop strings needs answers with plain text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import Served, serving

from dovetail.proof.served.run import SERVED, calibrated, opened

WITHOUT = {"cached": "not applicable", "speculated": "not applicable"}  # no prefix cache, no second server


@pytest.fixture(scope="module")
def plain(trained) -> Iterator[Served]:
    _, vocabulary = trained
    texts = [vocabulary.tokenizer.decode([token]) for token in range(vocabulary.tokenizer.size)]
    others = [token for token, text in enumerate(texts) if not (text.isascii() and text.isprintable() and text)]
    with serving(trained, without=others) as one:
        yield one


def test_all_that_the_laws_ask_for_is_offered_and_stop_strings_hold(plain: Served) -> None:
    case = opened(f"{plain.url}/v1", dtype="float32")
    assert case.quirks.lacks == {}
    assert (case.quirks.ids, case.quirks.lists, case.quirks.cold) == (True, True, "salt")
    assert SERVED.test("stops", case).state == "passed"


@pytest.mark.slow
def test_all_laws_hold(plain: Served) -> None:
    case = calibrated(opened(f"{plain.url}/v1", dtype="float32"))
    found = {name: SERVED.test(name, case) for name in SERVED.names()}
    assert {name: one.state for name, one in found.items()} == {**dict.fromkeys(found, "passed"), **WITHOUT}, found
