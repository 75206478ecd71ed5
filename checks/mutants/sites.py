"""The sites of mechanical mutations: every operator, number, term and axis of the source that can be changed.

    sites() -> [Site(file, number, line, what, within), …]        mutated(site) -> the source of its file with that change

A mutation flips an operator, moves an integer by one, multiplies a float by 1.5, drops a term or swaps an axis, in functions
and in constants of a module. Left out:

- by class: a `Proof` states what laws sample and except
- by function: `shifts_keys`, which only exceptions call, `whole_prefill`, `example` and `labels` are inputs of laws;
  those whose name begins with `check`, `expect`, `advise` and `__repr__` refuse or give advice, which tests compare, as
  they do changes of a spec (`swap`); `cost` in ops/ chooses a kernel, `absorbing` one of two forms of MLA; `joined_ranks`
  joins a torchrun job, which has tests of its own
- by name: module constants that set the size of a tile, chunk or message, which change no result, or that bound a field, which
  tests compare (SETTINGS)
- by file: messages (base/errors.py), limits of files (base/limits.py), and what tests compare but no law
  runs: the refusal of non-finite weights (nn/finite.py), the machine's memory (base/memory.py), short forms of YAML
  (spec/layers.py), names of dtypes (base/dtypes.py), the values that a field takes (spec/field.py); parallel/pair.py, which
  starts and stops the processes that laws run in
- by call: `FieldCause` lists what `verify` tries
- defaults of fields: every law names the fields it tests, so a default shows only where an oracle or a preset leaves it out
- strings and docstrings
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2] / "src" / "dovetail"
ROOMS = ("parts", "ops", "state", "base", "spec", "nn", "parallel")
FILES = ("model/model.py", "model/multi_token.py", "model/swap.py", "model/construction.py")
# inputs of laws, messages and advice: they change no result
NO_RESULT = frozenset(
    {
        "advise",
        "shifts_keys",
        "whole_prefill",
        "example",
        "labels",
        "__repr__",
        "expect",
        "joined_ranks",
        "absorbing",
        "swap",
        "swap_position",
    }
)
LEFT_ALONE = {"ops": frozenset({"cost"})}
NOT_RUN = ("nn/finite.py", "base/memory.py", "spec/layers.py", "base/dtypes.py", "spec/field.py")  # by any law
LEFT_OUT = ("base/errors.py", "base/limits.py", "parallel/pair.py", *NOT_RUN)
# module constants that choose how something is computed, never what
SETTINGS = frozenset(
    {
        "TILE",
        "PIECE",
        "CHUNK",
        "LEAST",
        "LEAST_RUNS",
        "MOST_DECODE_QUERIES",
        "TOP_P_CANDIDATES",
        "HEAP_SLACK",
        "MAX_COUNTED",
        "LONGEST",
        "MOST",
        "SHORT",
        "CACHED_MASKS",
        "LANE",
    }
    | {"MAX_FACTOR", "MAX_MASKS", "MAX_PICKS", "MAX_STATE", "LARGEST_SPREAD"}  # bounds of fields
)
NO_EFFECT = frozenset({"FieldCause"})  # calls that describe, and compute nothing
CHOOSING = frozenset({"reference", "chunk"})  # calls by which an expression chooses how something is computed, not what

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
    """One possible mutation: the file, its number in the file, the line, what it does, and in which class and function."""

    file: str
    number: int
    line: int
    what: str
    within: str

    @property
    def module(self) -> str:
        """The module's name."""
        return _module(self.file)

    @property
    def in_parallel(self) -> bool:
        """Whether it changes how a model is sharded, which one rank alone does not show."""
        return self.file.startswith("parallel/")

    @property
    def name(self) -> str:
        """Return the site as text: file, line and change."""
        return f"{self.file}:{self.line} {self.what}"


def _module(file: str) -> str:
    return "dovetail." + file.removesuffix(".py").replace("/", ".")


class Visitor(ast.NodeTransformer):
    """Numbers the possible mutations of a file, and applies the one with the wanted number."""

    def __init__(self, wanted: int | None = None, room: str = "parts") -> None:
        self.left_alone, self.wanted, self.count = LEFT_ALONE.get(room, NO_RESULT), wanted, 0
        self.found: list[tuple[int, str]] = []  # line and change of each …
        self.places: list[str] = []  # … and the class and function around it
        self.depth = 0
        self.within: list[str] = []

    def offer(self, node: Any, what: str, change: Callable[[Any], ast.AST]) -> ast.AST | None:
        """Number one mutation; return the changed node where it is the wanted one."""
        self.found.append((node.lineno, what))
        self.places.append(".".join(self.within))
        self.count += 1
        return change(copy.deepcopy(node)) if self.count - 1 == self.wanted else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self.left_alone or node.name.lstrip("_").startswith("check"):
            return node
        self.depth += 1
        self.within.append(node.name)
        body = node.body[1:] if ast.get_docstring(node) else node.body
        node.body[len(node.body) - len(body) :] = [self.visit(statement) for statement in body]
        self.within.pop()
        self.depth -= 1
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.within.append(node.name)
        if node.name.endswith("Proof"):
            return node
        node.body = [self.visit(s) if isinstance(s, (ast.FunctionDef, ast.ClassDef)) else s for s in node.body]
        self.within.pop()
        return node

    def visit(self, node: ast.AST) -> Any:
        """Visit a node, unless it only chooses between forms of one computation, which laws compare with each other."""
        chooses = isinstance(node, (ast.BoolOp, ast.Compare, ast.Call)) and not CHOOSING.isdisjoint(_called(node))
        describes = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NO_EFFECT
        return node if chooses or describes else super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node  # the annotation changes nothing

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if self.depth or not any(name.isupper() for name in names) or names & SETTINGS:
            return self.generic_visit(node) if self.depth else node
        self.depth += 1  # a constant of the module
        node.value = self.visit(node.value)
        self.depth -= 1
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # error messages

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # messages

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        flipped = FLIPPED.get(type(node.ops[0]))
        if self.depth and flipped is not None:
            changed = self.offer(node, f"{ast.unparse(node)}: {flipped.__name__}", lambda n: _with_op(n, flipped))
            if changed is not None:
                return changed
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        flipped = FLIPPED[type(node.op)]
        if self.depth:
            changed = self.offer(node, f"{ast.unparse(node)}: {flipped.__name__}", lambda n: _with(n, "op", flipped()))
            if changed is not None:
                return changed
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        flipped = FLIPPED.get(type(node.op))
        if self.depth and flipped is not None:
            text = ast.unparse(node)
            changed = self.offer(node, f"{text}: {flipped.__name__}", lambda n: _with(n, "op", flipped()))
            changed = changed or self.offer(node, f"{text}: the second term dropped", lambda n: n.left)
            if changed is not None:
                return changed
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if self.depth and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return self._axis(node)
        if self.depth and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
            changed = self.offer(node, f"{ast.unparse(node)}: the sign dropped", lambda n: n.operand)
            if changed is not None:
                return changed
        return self.generic_visit(node)

    def _axis(self, node: ast.UnaryOp) -> ast.AST:
        value = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if value not in (1, 2, 3):
            return node
        other = {1: 2, 2: 1, 3: 2}[value]
        changed = self.offer(node, f"axis -{value}: -{other}", lambda n: _with(n, "operand", ast.Constant(other)))
        return changed or node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self.depth and type(node.value) is int and 0 < node.value < 1000:
            value = node.value
            changed = self.offer(node, f"{value}: {value + 1}", lambda n: _with(n, "value", value + 1))
            return changed or node
        if self.depth and type(node.value) is float and node.value != 0.0:
            number = node.value
            changed = self.offer(node, f"{number}: {number * 1.5}", lambda n: _with(n, "value", number * 1.5))
            return changed or node
        return node


def _called(node: ast.AST) -> set[str]:
    """The functions that an expression of comparisons, or a min or max of sizes, calls."""
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in ("min", "max")):
        return set()
    return {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def _with(node: Any, field: str, value: Any) -> ast.AST:
    setattr(node, field, value)
    return node


def _with_op(node: Any, op: type[ast.AST]) -> ast.AST:
    node.ops[0] = op()
    return node


def _files() -> list[Path]:
    """The files that may be changed: those of the rooms."""
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if path.name != "__init__.py"]
    left_out = {ROOT / name for name in LEFT_OUT}
    return [path for path in found if path not in left_out] + [ROOT / name for name in FILES]


def _visited(file: str, wanted: int | None = None) -> tuple[Visitor, ast.AST]:
    visitor = Visitor(wanted, file.partition("/")[0])
    return visitor, visitor.visit(ast.parse((ROOT / file).read_text(encoding="utf-8")))


def sites() -> list[Site]:
    """Every possible mutation."""
    visited = {name: _visited(name)[0] for name in (path.relative_to(ROOT).as_posix() for path in _files())}
    return [
        Site(name, number, line, what, within)
        for name, visitor in visited.items()
        for number, ((line, what), within) in enumerate(zip(visitor.found, visitor.places, strict=True))
    ]


def mutated(site: Site) -> str:
    """The file's source with the mutation."""
    return ast.unparse(ast.fix_missing_locations(_visited(site.file, site.number)[1]))


def users(module: str) -> set[str]:
    """The modules of the rooms that import this one, however indirectly, and itself."""
    imported = {_module(path.relative_to(ROOT).as_posix()): _imported(path) for path in _files()}
    found = {module}
    while more := {name for name, used in imported.items() if used & found} - found:
        found |= more
    return found


def _imported(path: Path) -> set[str]:
    """Every dotted name a file imports: of `from a import b` both a and a.b, which may be a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {name for node in named for alias in node.names for name in (node.module or "", f"{node.module}.{alias.name}")}
