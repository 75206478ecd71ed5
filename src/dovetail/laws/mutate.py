"""Mechanical mutations of parts/ and ops/: an operator flipped, a number moved by one, a term dropped, an axis swapped.

    sites -> one is chosen -> a fresh process imports the package with that file changed -> oracles and laws -> killed or not

Left alone: `samples`, `excepts` and `idle` (what the laws try), `check` and `advise` (words, held by tests), `cost` (which
kernel runs, not what it computes), texts and docstrings. Before any mutant the code as it is must pass the same questions.
The process is forked from one that has torch and nothing of ours, so that nothing imported before can hide the change; for
the same reason this file imports only our errors at the top.
"""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing as mp
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dovetail.core.errors import DovetailError

ROOT = Path(__file__).parent.parent
ROOMS = ("parts", "ops")
LEFT_ALONE = frozenset(
    {"samples", "check", "advise", "excepts", "shifts_keys", "idle", "cost", "refuse_beyond", "example", "labels"}
)
SECONDS = 400.0  # a mutant that hangs is as good as caught
SPECS = 6  # wirings tried for a mutant that the oracles let pass
PARALLEL = 2

FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Site(NamedTuple):
    """One possible mutation: the file, its number in the file, the line, and what it does."""

    file: str
    number: int
    line: int
    what: str


class _Visitor(ast.NodeTransformer):
    """Counts mutations, and makes the one with the wanted number."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted, self.count = wanted, 0
        self.found: list[tuple[int, str]] = []
        self.depth = 0

    def offer(self, node: Any, what: str, change: Callable[[Any], ast.AST]) -> ast.AST | None:
        """Number one mutation; the changed node where it is the wanted one."""
        self.found.append((node.lineno, what))
        self.count += 1
        return change(copy.deepcopy(node)) if self.count - 1 == self.wanted else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in LEFT_ALONE:
            return node
        self.depth += 1
        body = node.body[1:] if ast.get_docstring(node) else node.body
        node.body[len(node.body) - len(body) :] = [self.visit(statement) for statement in body]
        self.depth -= 1
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(s) if isinstance(s, (ast.FunctionDef, ast.ClassDef)) else s for s in node.body]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # words of errors

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # texts

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        flipped = FLIPPED.get(type(node.ops[0]))
        if self.depth and flipped is not None:
            made = self.offer(node, f"{ast.unparse(node)}: {flipped.__name__}", lambda n: _with_op(n, flipped))
            if made is not None:
                return made
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        flipped = FLIPPED[type(node.op)]
        if self.depth:
            made = self.offer(node, f"{ast.unparse(node)}: {flipped.__name__}", lambda n: _with(n, "op", flipped()))
            if made is not None:
                return made
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        flipped = FLIPPED.get(type(node.op))
        if self.depth and flipped is not None:
            text = ast.unparse(node)
            made = self.offer(node, f"{text}: {flipped.__name__}", lambda n: _with(n, "op", flipped()))
            made = made or self.offer(node, f"{text}: the second term dropped", lambda n: n.left)
            if made is not None:
                return made
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if self.depth and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return self._axis(node)
        if self.depth and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
            made = self.offer(node, f"{ast.unparse(node)}: the sign dropped", lambda n: n.operand)
            if made is not None:
                return made
        return self.generic_visit(node)

    def _axis(self, node: ast.UnaryOp) -> ast.AST:
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if value not in (1, 2, 3):
            return node
        other = {1: 2, 2: 1, 3: 2}[value]
        made = self.offer(node, f"axis -{value}: -{other}", lambda n: _with(n, "operand", ast.Constant(other)))
        return made or node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self.depth and type(node.value) is int and 0 < node.value < 1000:
            value = node.value
            made = self.offer(node, f"{value}: {value + 1}", lambda n: _with(n, "value", value + 1))
            return made or node
        return node


def _with(node: Any, field: str, value: Any) -> ast.AST:
    setattr(node, field, value)
    return node


def _with_op(node: Any, op: type[ast.AST]) -> ast.AST:
    node.ops[0] = op()
    return node


def sites() -> list[Site]:
    """Every possible mutation."""
    found: list[Site] = []
    for path in (p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")) if p.name != "__init__.py"):
        visitor = _Visitor()
        visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
        name = str(path.relative_to(ROOT))
        found += [Site(name, number, line, what) for number, (line, what) in enumerate(visitor.found)]
    return found


def mutated(site: Site) -> str:
    """The file's source with the mutation."""
    tree = _Visitor(site.number).visit(ast.parse((ROOT / site.file).read_text(encoding="utf-8")))
    return ast.unparse(ast.fix_missing_locations(tree))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the changed source for one module, and leaves all others alone."""

    def __init__(self, site: Site) -> None:
        self.name = "dovetail." + site.file.removesuffix(".py").replace("/", ".")
        self.source, self.path = mutated(site), str(ROOT / site.file)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self, origin=self.path) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def judge(site: Site | None, seed: int, answer: Any) -> None:
    """The job of a fresh process: import with the change, ask oracles and laws, say what noticed first."""
    try:
        if site is not None:
            sys.meta_path.insert(0, _Finder(site))
        answer.send(_first_complaint(site, seed))
    except BaseException as error:  # a package that no longer imports is caught too
        answer.send(f"{type(error).__name__}: {error}"[:200])


def _first_complaint(site: Site | None, seed: int) -> str:
    import torch

    torch.set_num_threads(1)
    from dovetail.core.part import KINDS, walk_spec
    from dovetail.laws.case import LAWS
    from dovetail.laws.oracle import ask_kinds, check_oracles
    from dovetail.laws.suite import try_spec
    from dovetail.laws.wiring import quick_specs
    from dovetail.spec import to_yaml

    for kind in ask_kinds():
        for failure in check_oracles([kind]):
            return f"own_number: {failure}"[:200]
    module = "dovetail." + (site.file.removesuffix(".py").replace("/", ".") if site is not None else "")
    mine = {kind for kind, cls in KINDS.items() if cls.__module__ == module}
    specs = sorted(quick_specs(seed, 24), key=lambda s: -len(mine & {part.kind for _, part in walk_spec(s)}))
    names = [law.name for law in LAWS.values() if not law.dear and law.name != "ported"]
    for spec in specs[:SPECS] if site is not None else specs:
        for outcome in try_spec(to_yaml(spec), names, seed):
            if outcome.state == "failed":
                return f"{outcome.law}: {outcome.detail}"[:200]
    return ""


def _try(site: Site | None, seed: int) -> tuple[Site | None, str]:
    """A process for one mutant."""
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=judge, args=(site, seed, there), daemon=True)
    process.start()
    there.close()
    try:
        said = here.recv() if here.poll(SECONDS) else f"no answer in {SECONDS:.0f} s"
    except EOFError:
        said = "the process died"
    process.kill()
    process.join()
    return site, said


def run_random(count: int, seed: int, told: Callable[[int, int, str], None] | None = None) -> dict[str, Any]:
    """`count` mutations chosen by `seed`; {mutants, caught, rows, survivors}."""
    mp.get_context("forkserver").set_forkserver_preload(["torch"])
    _, complaint = _try(None, seed)
    if complaint:
        raise DovetailError(f"the code as it is does not pass: {complaint}")
    everything = sites()
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    rows: list[dict[str, Any]] = []
    for site, said in _tried(chosen, seed):
        assert site is not None
        name = f"{site.file}:{site.line} {site.what}"
        rows.append({"name": name, "caught": bool(said), "by": said})
        if told is not None:
            told(len(rows), len(chosen), f"{sum(not row['caught'] for row in rows)} live")
    rows.sort(key=lambda row: (row["caught"], row["name"]))
    caught = sum(row["caught"] for row in rows)
    alive = [row["name"] for row in rows if not row["caught"]]
    return {"mutants": len(rows), "caught": caught, "sites": len(everything), "survivors": alive, "rows": rows}


def _tried(chosen: list[Site], seed: int) -> Iterator[tuple[Site | None, str]]:
    with ThreadPoolExecutor(PARALLEL) as threads:
        for future in as_completed([threads.submit(_try, site, seed) for site in chosen]):
            yield future.result()
