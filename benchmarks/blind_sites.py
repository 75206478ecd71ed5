"""Mechanical mutations of a modeling file of transformers, for `blind.py`.

    file_of(model) -> ModelingFile        sites(file) -> [Site, …]        classes(file, site) -> its classes with that change

The sites are those of `python -m checks.mutants --random` (checks/mutants/sites.py: an operator, comparison, number, sign,
or axis), booleans, `is` and `is not`, and these, which are commonly confused in ports:

    argument    one argument of a call is dropped, or two neighbors are swapped
    call        a call is replaced by what it was called on, or by its first argument
    names       two variables, or two attributes of self, are swapped in one statement
    slice       a slice is shifted by one

Only code that a layer runs is changed: the classes of its modules, the class of the rotary tables, and the functions of the
same file that they call. The file is read from the installed package, changed in memory and executed there; its other classes
are left out.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses as dc
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seeded_bugs import layers
from torch import nn

from checks.mutants.sites import Visitor

KINDS = {
    ast.BinOp: "operator",
    ast.BoolOp: "comparison",
    ast.Compare: "comparison",
    ast.Constant: "constant",
    ast.UnaryOp: "sign or axis",
    ast.Call: "argument or call",
    ast.Slice: "slice",
}
NAMES = "names"
BUILT_IN = frozenset(dir(builtins))
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Is: ast.IsNot, ast.IsNot: ast.Is}
ROTARY = "rotary_emb"  # transformers' name of the module that computes cos and sin for all layers


@dc.dataclass(frozen=True)
class ModelingFile:
    """The source of a modeling file, and the code in it that a layer runs."""

    module: str  # name of the module of transformers
    source: str
    layer: str  # name of the class of a layer,
    rotary: str | None  # and of the rotary tables
    region: frozenset[str]  # classes and functions that may be changed


@dc.dataclass(frozen=True)
class Site:
    """One possible mutation."""

    number: int
    kind: str
    line: int
    what: str
    within: str  # class and function
    statement: str  # the text of the innermost statement


def file_of(model: Any) -> ModelingFile:
    """The modeling file of a model's layers."""
    layer = layers(model)[0]
    module = type(layer).__module__
    rotary = dict(model.base_model.named_children()).get(ROTARY)
    inner = [*layer.modules(), *([] if rotary is None else [rotary])]
    found = {type(one).__name__ for one in inner if type(one).__module__ == module}
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    defined = {node.name: node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    functions = {name for name, node in defined.items() if isinstance(node, ast.FunctionDef)}
    while more := {name for one in found for name in _names(defined[one]) & functions} - found:
        found |= more
    return ModelingFile(
        module, source, type(layer).__name__, None if rotary is None else type(rotary).__name__, frozenset(found)
    )


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


class Mutations(Visitor):
    """Numbers the possible mutations of the region, and applies the one with the wanted number."""

    def __init__(self, region: frozenset[str], wanted: int | None = None) -> None:
        super().__init__(wanted)
        self.region, self.statement = region, ""
        self.outside: set[str] = set()  # names of imports, classes and functions: no variables
        self.sites: list[Site] = []

    def offer(self, node: Any, what: str, change: Callable[[Any], ast.AST]) -> ast.AST | None:
        """Number one mutation; return the changed node where it is the wanted one."""
        kind = KINDS.get(type(node), NAMES)
        self.sites.append(Site(self.count, kind, node.lineno, what, ".".join(self.within), self.statement))
        return super().offer(node, what, change)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Visit the region alone, and leave out other classes and functions."""
        definitions = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
        imports = [alias for one in node.body if isinstance(one, (ast.Import, ast.ImportFrom)) for alias in one.names]
        self.outside = {(alias.asname or alias.name).partition(".")[0] for alias in imports} | {one.name for one in definitions}
        left_out = [one for one in definitions if one.name not in self.region]
        node.body = [self.visit(one) if one in definitions else one for one in node.body if one not in left_out]
        return node

    def visit(self, node: ast.AST) -> Any:
        """Visit a node and remember its statement; in a statement without others inside, names may be swapped."""
        if not isinstance(node, ast.stmt) or not self.depth:
            return super().visit(node)
        before, self.statement = self.statement, _text(node)
        simple = isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr))
        visited = (self._swapped(node) if simple else None) or super().visit(node)
        self.statement = before
        return visited

    def _swapped(self, node: ast.stmt) -> ast.AST | None:
        """Two variables or attributes of self that the statement reads, swapped."""
        read = dict.fromkeys(ast.unparse(one) for one in ast.walk(node) if self._variable(one))
        for one, other in itertools.combinations(read, 2):
            if one.startswith("self.") != other.startswith("self."):
                continue
            both = {one: other, other: one}
            changed = self.offer(node, f"{one} and {other} swapped", lambda n, both=both: _Renamed(self, both).visit(n))
            if changed is not None:
                return changed
        return None

    def _variable(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            return isinstance(node.value, ast.Name) and node.value.id == "self"
        return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and self._local(node.id)

    def _local(self, name: str) -> bool:
        return name != "self" and name not in self.outside and name not in BUILT_IN

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Drop an argument, swap two, or drop the call."""
        text = ast.unparse(node)
        for what, change in self._changes(node):
            changed = self.offer(node, f"{text}: {what}", change)
            if changed is not None:
                return changed
        return self.generic_visit(node)

    def _changes(self, node: ast.Call) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
        for i in range(len(node.keywords)):
            if node.keywords[i].arg is not None:
                yield f"{node.keywords[i].arg} dropped", lambda n, i=i: _without(n, n.keywords, i)
        for i in range(len(node.args) if len(node.args) > 1 else 0):
            yield f"argument {i + 1} dropped", lambda n, i=i: _without(n, n.args, i)
        for i in range(len(node.args) - 1):
            yield f"arguments {i + 1} and {i + 2} swapped", lambda n, i=i: _exchanged(n, i)
        if isinstance(node.func, ast.Attribute) and self._value(node.func.value):
            yield "the call dropped", lambda n: n.func.value
        elif node.args:
            yield "the call dropped", lambda n: n.args[0]

    def _value(self, node: ast.AST) -> bool:
        """Whether an expression is a value, not self or a module."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            return True
        return self._local(root.id) or (root.id == "self" and node is not root)

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """Shift a slice by one, to the right where it has an end, to the left where it has a start."""
        text, changed = ast.unparse(node), None
        if node.upper is not None:
            changed = self.offer(node, f"[{text}] + 1", lambda n: _shifted(n, 1))
        if changed is None and node.lower is not None:
            changed = self.offer(node, f"[{text}] - 1", lambda n: _shifted(n, -1))
        return changed or self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Turn `is` into `is not`; change other comparisons as elsewhere."""
        opposite = OPPOSITE.get(type(node.ops[0]))
        if opposite is None:
            return super().visit_Compare(node)
        text = f"{ast.unparse(node)}: {opposite.__name__}"
        changed = self.offer(node, text, lambda n: ast.Compare(n.left, [opposite()], n.comparators))
        return changed or self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Flip a boolean; change numbers as elsewhere."""
        if isinstance(node.value, bool):
            changed = self.offer(node, f"{node.value}: {not node.value}", lambda n: ast.Constant(not n.value))
            return changed or node
        return super().visit_Constant(node)


class _Renamed(ast.NodeTransformer):
    """Swaps two variables or attributes that a statement reads."""

    def __init__(self, mutations: Mutations, both: dict[str, str]) -> None:
        self.mutations, self.both = mutations, both

    def visit(self, node: ast.AST) -> Any:
        if self.mutations._variable(node) and (other := self.both.get(ast.unparse(node))) is not None:
            return ast.parse(other, mode="eval").body
        return self.generic_visit(node)


def _text(node: ast.stmt) -> str:
    """The text of a statement; of one with others inside, only its head."""
    if isinstance(node, (ast.If, ast.While)):
        return ast.unparse(node.test)
    if isinstance(node, ast.For):
        return f"{ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    return "" if isinstance(node, (ast.With, ast.FunctionDef, ast.Try)) else ast.unparse(node)


def _without(node: ast.Call, among: list[Any], i: int) -> ast.AST:
    del among[i]
    return node


def _exchanged(node: ast.Call, i: int) -> ast.AST:
    node.args[i], node.args[i + 1] = node.args[i + 1], node.args[i]
    return node


def _shifted(node: ast.Slice, by: int) -> ast.AST:
    lower, upper = node.lower or ast.Constant(0), node.upper or ast.Constant(0)
    node.lower, node.upper = (ast.BinOp(one, ast.Add(), ast.Constant(by)) for one in (lower, upper))
    return node


def sites(file: ModelingFile) -> list[Site]:
    """Every possible mutation of a file."""
    visitor = Mutations(file.region)
    visitor.visit(ast.parse(file.source))
    return visitor.sites


def classes(file: ModelingFile, site: Site | None) -> dict[str, type[nn.Module]]:
    """The classes of the region with one mutation, or with none; errors are those of the changed code."""
    tree = Mutations(file.region, None if site is None else site.number).visit(ast.parse(file.source))
    code = compile(ast.fix_missing_locations(tree), f"{file.module}, mutated", "exec")
    module = types.ModuleType(f"{file.module}_mutated")
    module.__package__ = file.module.rpartition(".")[0]  # for its relative imports
    sys.modules[module.__name__] = module  # where decorators look a class up
    exec(code, vars(module))
    return {name: value for name, value in vars(module).items() if isinstance(value, type) and name in file.region}
