"""Measure the structure of the sources: `python -m checks.house` prints the numbers, `--write` stores them as today's limits.

tests/test_house.py holds each number to the stored one, so that a change which raises one says so and why: it changes
checks/house.json in the same commit.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAG = re.compile(r"</?(?:html|head|body|div|span|p|h[1-6]|table|tr|t[dh]|[uo]l|li|svg|details|style|script)(?:\s[^<>]*)?>")
SOURCE, STORED = ROOT / "src" / "dovetail", ROOT / "checks" / "house.json"
LONG = 80  # lines of a function, with its signature and its docstring
LATER = (  # what came after the bounds of the sources were set: they are counted without it. Patterns of paths in the package
    *(
        "look/*",
        "experiments/*",
        "api/report.py",
        "views/look.py",
        "views/heat.py",
        "proof/laws/swept.py",
        "training/dynamics.py",
    ),
    *("api/lab.py", "api/scaling.py", "views/lab.py", "views/scaling.py", "views/chart.py"),
    *("api/probe.py", "data/tasks/*", "training/answers.py"),
    *("decoding/eviction.py", "decoding/scoring.py", "state/attended.py", "proof/laws/evicted.py", "serving/lookahead.py"),
    *("api/*_recipe*.py", "files/recipes.py", "views/recipe.py", "api/*_exercise*.py", "files/exercises.py"),
    *("parts/functional.py", "parts/mixer/differential.py", "parts/mixer/rg_lru.py", "parts/mixer/short_conv.py"),
    *("api/sample.py", "api/learn_tokenizer.py", "api/prune_heads.py", "weights/surgery/heads.py"),
)


@cache
def trees() -> Mapping[Path, ast.Module]:
    """The parsed sources of the package."""
    return MappingProxyType({path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))})


def measure() -> dict[str, int]:
    """Every number, by its name."""
    classes = Counter(node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in trees()}
    statements = {path: sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) for path, tree in trees().items()}
    earlier = [path for path in trees() if not is_later(path.relative_to(SOURCE))]
    return {
        "files": len(trees()),
        "lines": sum(lines.values()),
        "statements": sum(statements.values()),
        "earlier files without dialects": sum("dialect" not in path.parts for path in earlier),
        "earlier lines": sum(lines[path] for path in earlier),
        "earlier statements": sum(statements[path] for path in earlier),
        "files over 400 lines": sum(count > 400 for count in lines.values()),
        "files over 300 lines": sum(count > 300 for count in lines.values()),
        "floors": len(floors()),
        "rooms in import circles": sum(len(circle) for circle in circles(room_imports())),
        "class names defined twice": sum(count > 1 for count in classes.values()),
        "options declared twice": len(options_declared_twice()),
        "rich outside views and cli": sum(_imports(tree, "rich") for tree in _outside("views", "cli")),
        "HTML outside views": sum(_writes_html(tree) for tree in _outside("views")),
        "lines of api and cli": sum(count for path, count in lines.items() if _in_api_or_cli(path)),
        f"functions over {LONG} lines in api and cli": len(long_functions()),
        **{f"methods of {name}": count for name, count in methods().items()},
        **passes(),
    }


def is_later(path: Path) -> bool:
    """Whether a file of the package belongs to a capability that came after the bounds of the sources were set."""
    return any(fnmatch(path.as_posix(), pattern) for pattern in LATER)


def floors() -> list[str]:
    """The layers of the linter's contract, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return next(contract["layers"] for contract in contracts if contract["type"] == "layers")


def room_imports() -> dict[str, set[str]]:
    """Room -> the rooms that its files import at their top level; a room is a folder or a file of the package."""
    edges: dict[str, set[str]] = {}
    for path, tree in trees().items():
        room = _room(path.relative_to(SOURCE).with_suffix("").parts)
        targets = edges.setdefault(room, set())
        for name in _imported(tree.body):
            parts = tuple(name.split("."))
            if parts[0] == "dovetail" and len(parts) > 1:
                targets.add(_room(parts[1:]))
        targets.discard(room)
    return edges


def _room(parts: tuple[str, ...]) -> str:
    return parts[0]


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Try):
            yield from _imported(node.body)


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The groups of nodes that reach each other."""
    reach = {node: _reachable(node, edges) for node in edges}
    groups = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in edges}
    return [set(group) for group in groups if len(group) > 1]


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        fresh = edges.get(waiting.pop(), set()) - found
        found |= fresh
        waiting += fresh
    return found


def options_declared_twice() -> list[str]:
    """verb.option for each option that a verb's function in api/ has, and that the `run` of its file in cli/ declares again."""
    twice = list[str]()
    for path in sorted((SOURCE / "cli").glob("*.py")):
        api = SOURCE / "api" / path.name
        runs = [n for n in trees()[path].body if isinstance(n, ast.FunctionDef) and n.name == "run"]
        functions = [n for n in trees().get(api, ast.Module([], [])).body if isinstance(n, ast.FunctionDef)]
        public = [n for n in functions if n.name == path.stem]
        ours, theirs = ({arg.arg for n in some for arg in (*n.args.args, *n.args.kwonlyargs)} for some in (runs, public))
        twice += [f"{path.stem}.{name}" for name in sorted(ours & theirs)]
    return twice


def _outside(*rooms: str) -> Iterator[ast.Module]:
    """The sources that are in none of these rooms."""
    yield from (tree for path, tree in trees().items() if _room(path.relative_to(SOURCE).with_suffix("").parts) not in rooms)


def _imports(tree: ast.Module, package: str) -> bool:
    """Whether a file imports a package, at its top level or in a function."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return any(name.split(".")[0] == package for name in _imported(list(nodes)))


def _writes_html(tree: ast.Module) -> bool:
    """Whether a file has a string with a tag of HTML."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return any(isinstance(value, str) and TAG.search(value) is not None for value in constants)


def long_functions() -> list[str]:
    """file:function for each function of the api and cli rooms that is longer than LONG lines."""
    return [
        f"{path.relative_to(SOURCE)}:{node.name}"
        for path, tree in trees().items()
        if _in_api_or_cli(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG
    ]


def _in_api_or_cli(path: Path) -> bool:
    return path.relative_to(SOURCE).parts[0] in ("api", "cli")


def methods() -> dict[str, int]:
    """The methods and properties of the two classes that every part meets, over all their bases."""
    found = {"Part": ("dovetail.spec.part", "Part"), "Ctx": ("dovetail.nn.ctx", "Ctx")}
    return {name: len(_own(getattr(importlib.import_module(module), kind))) for name, (module, kind) in found.items()}


def _own(kind: type) -> set[str]:
    return {
        name
        for base in kind.__mro__
        if base.__module__.startswith("dovetail")
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod))
    }


def passes() -> dict[str, int]:
    """Files, functions and calls of a forward pass and of a decode step of a small Llama, called for the second time."""
    import torch

    import dovetail as dt
    from dovetail.decoding.steps import Decoder

    torch.manual_seed(0)
    model = dt.build("llama-tiny").eval()
    ids = torch.randint(0, 512, (1, 8))
    decoder = Decoder(model, dt.Pool(model.spec, rows=1, capacity=32))
    with torch.inference_mode():
        decoder.step(ids, [0])
        counts = {"forward pass": _counted(lambda: model(ids)), "decode step": _counted(lambda: decoder.step(ids[:, :1], [0]))}
    return {f"{what} of a {name}": value for name, each in counts.items() for what, value in each.items()}


def _counted(run: Callable[[], Any]) -> dict[str, int]:
    run()
    calls: Counter[tuple[str, str, int]] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            calls[code.co_filename, code.co_qualname, code.co_firstlineno] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {"files": len({file for file, *_ in calls}), "functions": len(calls), "calls": sum(calls.values())}


def main() -> int:
    """Print the numbers beside the stored ones; with --write, store them."""
    numbers = measure()
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for name, value in numbers.items():
        print(f"{name:36} {value:>8,} {stored.get(name, 0):>8,}")
    if "--write" in sys.argv[1:]:
        STORED.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
