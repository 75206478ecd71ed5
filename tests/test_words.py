"""Phrases of a private vocabulary do not come back: the code, its messages and the documents use the words of the field.

Regular expressions, not single words: memory, share and held-out stay legitimate. Translated idioms are
retired only in the prose of the pages; docs/log.md and CHANGELOG.md are history.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RETIRED = (
    r"decode memory",
    r"first (weights|values)",
    r"heads of keys and values",
    r"cut over ranks",
    r"readable (truth|kernel|one)",
    r"the dear laws",
    r"looking whether",
    r"(is|are) told",
    r"goes? on rightly",
    r"for the very \w+ it stands in",
    r"which there are",
    r"what a friend would say",
    r"lets? the model write",
    r"says no next token",
    r"is there and is no",
    r"the words of other libraries",
    r"a (token|rank|layer|row|head) in (bf16|all)",
    r"what is to be said",
    r"what is not ours",
    r"lets? through",
    r"numbers? of memory",
    r"(an? encoder's|the decoder's) memory",
    r"(one|two|four|eight) a (row|token|layer|rank|head|branch|channel)",
    r"a number an? (token|channel|expert|head)",
    r"says it all",
    r"unturned",
    r"(a|the) stranger",
    r"made anew",
    r"once a (step|key|layer)",
    r"goes? on into",
    r"lies? evenly",
    r"the readable",
    r"remembered (of|after) ",
    r"what a part answers",
    r"has opinions",
)
TRANSLATED = (
    r"(?<!let.)\balone\b",  # only X; X by itself
    r"\b(tokens?|text|padding|stands) behind\b",  # after
    r"\b(so|this) many\b",  # N; the number of
    r", too[.,;:)]",  # also
    r"\bmend(s|ed)?\b",  # fix
    r"whole pass(es)?",  # full forward pass
    r"\(\[taken\]",  # measured
    r"(is|are|be) held to",  # checked against
    r"the begin of",  # the start of
    r"(be|is|are) asked (of|by|for)\b",  # run on; queried
    r"at hand\b",  # available
    r"looked into",  # investigated
    r"where (there is|it is|they are) (none|not)",  # if there is none
)
# variables that do not say what they hold, and how often each is bound in the package. The numbers only fall: write `request`,
# `leaf`, `path`, `result`, and lower them
VAGUE = {"one": 490, "found": 185, "place": 174, "own": 157, "made": 23, "given": 112}
PATTERN, IDIOM = (re.compile("|".join(phrases).replace(" ", r"\s+"), re.IGNORECASE) for phrases in (RETIRED, TRANSLATED))
PYTHON = ("src/**/*.py", "docs/*.py", "benchmarks/**/*.py", "recipes/*.py", "tests/**/*.py")
WHERE = (*PYTHON, "src/**/*.yaml", "docs/*.md", "*.md", ".ci/*")
FILES = sorted({path for pattern in WHERE for path in ROOT.glob(pattern) if path.is_file()} - {Path(__file__)})
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md")]


def retired(text: str, pattern: re.Pattern[str] = PATTERN) -> list[tuple[int, str]]:
    """(line, phrase) of each retired phrase; a phrase may run over the end of a line of prose or of a comment."""
    joined = re.sub(r"\n[ \t]*(# )?", lambda match: "\n" + " " * (len(match[0]) - 1), text)
    return [(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())) for match in pattern.finditer(joined)]


def prose(text: str) -> str:
    """The text of a page without its code; lines keep their numbers."""
    return re.sub(r"^```.*?^```|`[^`\n]+`", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def test_no_retired_phrase() -> None:
    matches = {str(path.relative_to(ROOT)): retired(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: phrases for path, phrases in matches.items() if phrases} == {}


def test_no_translated_idiom_in_the_prose() -> None:
    matches = {str(path.relative_to(ROOT)): retired(prose(path.read_text(encoding="utf-8")), IDIOM) for path in PAGES}
    assert {path: phrases for path, phrases in matches.items() if phrases} == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The decode memory of a row.", [1]),
        ("x = 1  # drawn as first\n# weights are", [1]),
        ("The KV cache, its share of memory, and held-out text.", []),
        ("the first weight matrix", []),
        ("nothing\nthe laws are\n    told apart", [2]),
        ("one entry per token, two per row", []),
        ("one entry, so two a token", [1]),
    ],
)
def test_a_retired_phrase_is_found(text: str, lines: list[int]) -> None:
    assert [line for line, _ in retired(text)] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The mask reaches attention\nalone, and the tokens behind it.", [2, 2]),
        ("let alone two; behind a proxy; too many rows; held-out rows", []),
        ("```text\na whole pass\n```\n`so many` GPUs\na whole\npass", [5]),
    ],
)
def test_a_translated_idiom_is_found_in_prose(text: str, lines: list[int]) -> None:
    assert [line for line, _ in retired(prose(text), IDIOM)] == lines


def bound(tree: ast.AST) -> Iterator[str]:
    """The names that assignments, loops, comprehensions, walruses and arguments bind, one for each place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_vague_variables_do_not_spread() -> None:
    counts: Counter[str] = Counter()
    for path in (ROOT / "src").rglob("*.py"):
        counts.update(bound(ast.parse(path.read_text(encoding="utf-8"))))
    assert {name: counts[name] for name, limit in VAGUE.items() if counts[name] > limit} == {}


def test_bound_names_are_those_of_every_place() -> None:
    source = (
        "def f(one, *own):\n    for found in own:\n        place = [one for one in found if (made := one)]\n    return place"
    )
    assert Counter(bound(ast.parse(source))) == {"one": 2, "own": 1, "found": 1, "place": 1, "made": 1}
