"""Programs of a tokenizer: its methods, one by one and in several threads at once. Each result is that of a fresh one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from checks.programs.frame import Kind, Session, Step, wrong
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END, MASK, Tokenizer

PIECES = ("the cat", END, " sat ", MASK, "12\n", "é", "<|new|>", " ")
CALLS: dict[str, Callable[[Tokenizer, str], object]] = {
    "encode": lambda one, text: one.encode(text).tolist(),
    "encode_batch": lambda one, text: [ids.tolist() for ids in one.encode_batch([text, text[:3]])],
    "prompt": lambda one, text: one.prompt(text),
    "prompt without more": lambda one, text: one.prompt(text, add_special=False),
    "prompt of plain text": lambda one, text: one.prompt(text, recognized=False),
    "pair": lambda one, text: one.pair(text, text[:3]),
    "decode": lambda one, text: one.decode([ord(char) % 200 for char in text]),
    "label": lambda one, text: one.label(len(text)),
    "with_special": lambda one, text: one.with_special(["<|new|>"]).prompt(text),
}


@cache
def _json() -> str:
    return learn("the cat sat on the mat; 12 mice ate 3 cheeses. " * 8, 270).to_json()


def fresh() -> Tokenizer:
    """A new tokenizer."""
    return Tokenizer(learn("a", 259).engine.from_str(_json()))


@cache
def expected(call: str, text: str) -> object:
    """What a fresh tokenizer returns."""
    return CALLS[call](fresh(), text)


class TokenizerKind(Kind):
    """A tokenizer."""

    name = "tokenizer"

    def sample(self, rng: random.Random) -> tuple[dict[str, Any], list[Step]]:
        def one() -> list[str]:
            return [rng.choice(list(CALLS)), "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4)))]

        steps = list[Step]()
        for _ in range(rng.randint(2, 8)):
            if rng.random() < 0.7:
                steps.append(("call", dict(zip(("name", "text"), one(), strict=True))))
            else:
                steps.append(
                    ("threads", {"calls": [one() for _ in range(rng.randint(2, 4))], "times": rng.choice([5, 20, 60])})
                )
        return {}, steps

    def start(self, setup: Mapping[str, Any]) -> TokenizerSession:
        return TokenizerSession()


class TokenizerSession(Session):
    """A tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = fresh()

    def do_call(self, name: str, text: str) -> None:
        if (got := CALLS[name](self.tokenizer, text)) != expected(name, text):
            wrong(f"{name} of {text!r} returned {got}, a fresh tokenizer {expected(name, text)}")

    def do_threads(self, calls: list[list[str]], times: int) -> None:
        """Each call is repeated in a thread of its own."""
        failures = list[Exception]()

        def repeat(name: str, text: str) -> None:
            try:
                for _ in range(times):
                    self.do_call(name, text)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=repeat, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
