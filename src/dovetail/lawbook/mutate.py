"""Mechanical mutations of parts/, ops/, state/, core/, model.py and construction.py: an operator flipped, an integer moved by
one, a float multiplied by 1.5, a term dropped, an axis swapped, in functions and in constants of a module.

    sites -> one is chosen -> a fresh process imports the package with that file changed -> oracles and laws -> killed or not

Left out:

- by function: `samples`, `excepts` (with `shifts_keys`, which only it calls), `idle`, `example` and `labels` are inputs of
  laws; `check`, `expect`, `advise`, `refuse_beyond` and `__repr__` are messages, which tests compare; `cost` in ops/ chooses a
  kernel
- by name: module constants that set the size of a tile or chunk (SETTINGS), which change no result
- by file: messages (core/errors.py, core/printable.py); dist/, because a second rank is another process, which imports the
  unchanged source. Seeded bugs of the sharded law are seeded in the ranks themselves (`seeded/ranks.py`)
- defaults of fields: every law names the fields it tests, so a default shows only where an oracle or a preset leaves it out
- strings and docstrings

Before any mutant the unchanged code must pass the same checks. The likeliest checks come first, and the first failure ends the
run: oracles of kinds in the changed file, of kinds whose file uses it, of all others; then every law on a few specs that hold
these kinds, the slowest law last.

The process is forked from one that has imported torch and nothing of ours, so that no earlier import hides the change; for the
same reason this file imports only our errors at the top. Memory and CPU time of the process are limited: a mutant that loops
forever is caught by the limit, and a busy machine does not make a slow one look caught.
"""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing as mp
import random
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dovetail.core.errors import DovetailError

ROOT = Path(__file__).parent.parent
ROOMS = ("parts", "ops", "state", "core")
FILES = ("model.py", "construction.py")
# what laws sample, messages, and advice: they change no result
NO_RESULT = frozenset(
    {"samples", "check", "advise", "excepts", "shifts_keys", "idle", "refuse_beyond", "example", "labels", "__repr__", "expect"}
)
LEFT_ALONE = {"ops": frozenset({"cost"})}
MESSAGES = ("core/errors.py", "core/printable.py")
# module constants that choose how something is computed, never what
SETTINGS = frozenset({"TILE", "PIECE", "CHUNK", "LEAST", "FEW", "LOOKED_AT", "MOST_BLOCKS", "LONGEST"})
CHOOSING = frozenset({"reference", "chunk"})  # calls by which an expression chooses how something is computed, not what
SECONDS = 120  # of the processor, several times what all questions take: a mutant that hangs is as good as caught
PATIENCE = 10  # times that by the clock; who has not answered then counts as alive: nobody complained, the machine was busy
MEMORY = 6 * 2**30  # bytes of address space; the code as it is runs within them too
SPECS = 6  # wirings tried for a mutant that the oracles let pass
LAST = ("every_field",)  # builds a model for each field: as dear as all other laws together
COMPILED = 2  # of the wirings so many are compiled at the very end
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
    def name(self) -> str:
        """Return the site as text: file, line and change."""
        return f"{self.file}:{self.line} {self.what}"


def _module(file: str) -> str:
    return "dovetail." + file.removesuffix(".py").replace("/", ".")


class _Visitor(ast.NodeTransformer):
    """Counts mutations, and makes the one with the wanted number."""

    def __init__(self, wanted: int | None = None, room: str = "parts") -> None:
        self.left_alone, self.wanted, self.count = LEFT_ALONE.get(room, NO_RESULT), wanted, 0
        self.found: list[tuple[int, str]] = []  # line and what, and for each …
        self.places: list[str] = []  # … the class and function it stands in
        self.depth = 0
        self.within: list[str] = []

    def offer(self, node: Any, what: str, change: Callable[[Any], ast.AST]) -> ast.AST | None:
        """Number one mutation; the changed node where it is the wanted one."""
        self.found.append((node.lineno, what))
        self.places.append(".".join(self.within))
        self.count += 1
        return change(copy.deepcopy(node)) if self.count - 1 == self.wanted else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self.left_alone:
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
        node.body = [self.visit(s) if isinstance(s, (ast.FunctionDef, ast.ClassDef)) else s for s in node.body]
        self.within.pop()
        return node

    def visit(self, node: ast.AST) -> Any:
        """A node and what lies in it, unless it only chooses a form: forms of one computation are held equal elsewhere."""
        chooses = isinstance(node, (ast.BoolOp, ast.Compare, ast.Call)) and not CHOOSING.isdisjoint(_called(node))
        return node if chooses else super().visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node  # what it is said to be changes nothing

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if self.depth or not any(name.isupper() for name in names) or names & SETTINGS:
            return self.generic_visit(node) if self.depth else node
        self.depth += 1  # a constant of the module
        node.value = self.visit(node.value)
        self.depth -= 1
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
        if self.depth and type(node.value) is float and node.value != 0.0:
            number = node.value
            made = self.offer(node, f"{number}: {number * 1.5}", lambda n: _with(n, "value", number * 1.5))
            return made or node
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
    """What may be changed: every file of the rooms."""
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if path.name != "__init__.py"]
    left_out = {ROOT / name for name in MESSAGES}
    return [path for path in found if path not in left_out] + [ROOT / name for name in FILES]


def _visited(file: str, wanted: int | None = None) -> tuple[_Visitor, ast.AST]:
    visitor = _Visitor(wanted, file.partition("/")[0])
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


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the changed source for one module, and leaves all others alone."""

    def __init__(self, site: Site) -> None:
        self.name, self.source, self.path = site.module, mutated(site), str(ROOT / site.file)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self, origin=self.path) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.path, "exec"), module.__dict__)


def judge(site: Site | None, seed: int, answer: Any) -> None:
    """The job of a fresh process: import with the change, ask oracles and laws, say what noticed first."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if site is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            warnings.simplefilter("ignore")
            sys.meta_path.insert(0, _Finder(site))
        answer.send(_first_complaint(site, seed))
    except BaseException as error:  # a package that no longer imports is caught too
        answer.send(f"{type(error).__name__}: {error}"[:200])


def _first_complaint(site: Site | None, seed: int) -> str:
    """What noticed first: a literal number, then a law; nothing where nobody did. Of the code as it is all specs are asked."""
    import torch

    torch.set_num_threads(1)
    from dovetail.core.part import KINDS, Part, walk_spec
    from dovetail.lawbook.case import LAWS, Case
    from dovetail.lawbook.cover import quick_specs
    from dovetail.lawbook.oracle import ask_kinds, check_oracles
    from dovetail.lawbook.suite import exceptions, try_law

    module, within = (site.module, site.within.partition(".")[0]) if site is not None else ("", "")
    using = users(module)

    def near(kind: str) -> int:
        home = KINDS[kind].__module__
        return 2 if home == module else 1 if home in using else 0

    def telling(spec: Part) -> tuple[int, int, int]:
        """How many of its kinds are computed by the changed class, live in the changed file, or use it."""
        held = {part.kind: part for _, part in walk_spec(spec)}
        changed = sum((module, within) in {(c.__module__, c.__name__) for c in _classes(part)} for part in held.values())
        return changed, sum(near(kind) == 2 for kind in held), sum(near(kind) == 1 for kind in held)

    for kind in sorted(ask_kinds(), key=near, reverse=True):
        for failure in check_oracles([kind]):
            return f"own_number: {failure}"[:200]
    specs = sorted(quick_specs(seed, 24), key=telling, reverse=True)[: SPECS if site is not None else None]
    cases = [Case(spec, seed) for spec in specs]
    declared = [exceptions(spec) for spec in specs]
    names = [law.name for law in LAWS.values() if not law.slow and law.name not in ("ported", *LAST)]
    compiled = cases[: COMPILED if site is not None else None]
    for name, asked in [*((name, cases) for name in (*names, *LAST)), ("compiled", compiled)]:
        for case, excepted in zip(asked, declared, strict=False):
            outcome = try_law(case, name, excepted.get(name, []))
            if outcome.state == "failed":
                return f"{outcome.law}: {outcome.detail}"[:200]
    return ""


def _classes(part: Any) -> list[type]:
    """The classes a part and its module are made of."""
    made = part.module()
    return [*type(part).__mro__, *(() if made is None else made.__mro__)]


def _try(site: Site | None, seed: int) -> tuple[Site | None, str]:
    """A process for one mutant."""
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=judge, args=(site, seed, there), daemon=True)
    process.start()
    there.close()
    patience = None if site is None else PATIENCE * SECONDS  # the code as it is has four times as many specs to pass
    try:
        said = here.recv() if here.poll(patience) else ""
    except EOFError:  # killed for its memory, or for its processor time
        said = "the process died"
    process.kill()
    process.join()
    return site, said


def run_random(count: int, seed: int, told: Callable[[int, int, str], None] | None = None) -> dict[str, Any]:
    """`count` mutations chosen by `seed`; {mutants, caught, rows, survivors}."""
    mp.get_context("forkserver").set_forkserver_preload(["torch"])
    if told is not None:
        told(0, count, "the code as it is")
    _, complaint = _try(None, seed)
    if complaint:
        raise DovetailError(f"the code as it is does not pass: {complaint}")
    everything = sites()
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    rows: list[dict[str, Any]] = []
    for site, said in _tried(chosen, seed):
        assert site is not None
        rows.append({"name": site.name, "within": site.within, "caught": bool(said), "by": said})
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
