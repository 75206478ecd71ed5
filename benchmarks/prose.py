"""Real English text that every machine with Python has: the topics of `help()` and the docstrings of the standard library.
Sources are parsed; no code in them is imported or executed."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from pathlib import Path

LARGEST_FILE = 1 << 20  # bytes; larger source files are skipped
ELSEWHERE = {"site-packages", "test", "tests", "idlelib"}


def python_text(seed: int = 0, most: int = 2_000_000) -> str:
    """About two megabytes of English (at most `most` characters), its pieces shuffled by the seed so that every part of it is
    alike."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not ELSEWHERE & set(path.parts))
    random.Random(seed).shuffle(files)
    pieces: dict[str, None] = {}
    size = 0
    for path in files:
        new = [text for text in docstrings(path) if len(text) > 80 and text not in pieces]
        pieces.update(dict.fromkeys(new))
        size += sum(map(len, new))
        if size > most:
            break
    texts = list(pieces)
    random.Random(seed).shuffle(texts)
    return "\n\n".join(texts)[:most]


def docstrings(path: Path) -> list[str]:
    """The docstrings of one file; for the topics of `help()`, every section."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # a template, or a file of another encoding
        return []
    if path.name == "topics.py":
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return [section for text in texts for section in text.split("\n\n\n")]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) if (text := ast.get_docstring(node))]
