"""Every public function, constructor and method refuses a keyword that it does not have, and names the one that was meant.

The list is found by introspection: the names of `dir(dovetail)`, the methods of the classes among them and of the classes that
public functions return, every registered kind, and the engine's classes that Python users construct.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dovetail as dt
import dovetail.parts  # registers every kind
from dovetail.api.engine import EngineOptions, start_engine
from dovetail.base.errors import KeywordError
from dovetail.base.keywords import ELSEWHERE
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request
from dovetail.spec.part import KINDS

NAMES = [name for name in dir(dt) if name != "__version__"]
CONSTRUCTED = (*(value for name in NAMES if isinstance(value := getattr(dt, name), type)), Engine, Request, EngineOptions)


def classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and hint.__module__.startswith("dovetail"):
        yield hint
    for inner in typing.get_args(hint):
        yield from classes_in(inner)


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__.startswith("dovetail"):
            yield f"{cls.__name__}.{name}", function


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function, with those that its module imports for type checkers only."""
    module = sys.modules[function.__module__]
    names = dict(vars(module))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found = importlib.import_module(node.module)
            names |= {one.asname or one.name: getattr(found, one.name) for one in node.names if hasattr(found, one.name)}
    return typing.get_type_hints(function, localns={"torch": torch} | names)


def public_callables() -> dict[str, Callable[..., Any]]:
    functions = {name: value for name in NAMES if not isinstance(value := getattr(dt, name), type)}
    returned = {cls for value in functions.values() for cls in classes_in(hints_of(value).get("return"))}
    table: dict[str, Callable[..., Any]] = dict(functions)
    for cls in {*CONSTRUCTED, *KINDS.values()}:
        if not issubclass(cls, Exception | torch.nn.Module):  # errors are raised, modules made by build
            table[cls.__name__] = cls
    for cls in {*CONSTRUCTED, *returned}:
        table.update(methods(cls))
    table["start_engine"] = start_engine
    return table


TABLE = public_callables()


def parameters(called: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(called).parameters.items() if name != "self"}


def misspelled(called: Callable[..., Any]) -> tuple[str, str] | None:
    """(a keyword with two letters swapped or one doubled, the option that was meant)."""
    known = parameters(called)
    for name, parameter in known.items():
        if parameter.default is not parameter.empty and parameter.kind is not parameter.POSITIONAL_ONLY and len(name) > 3:
            wrong = name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + name[-1]
            if wrong not in known:
                return wrong, name
    return None


def arguments(called: Callable[..., Any]) -> list[None]:
    """A value for each argument without a default: the keyword is refused before any is read."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in inspect.signature(called).parameters.values() if p.kind in kinds and p.default is p.empty]
    return [None] * len(given)


def test_the_list_is_whole() -> None:
    assert len(TABLE) > 200
    for name in (
        "train",
        "Transformer.generate",
        "Transformer.loss",
        "Attention",
        "TokenLayout.whole",
        "Chat.ask",
        "Model",
        "serve",
    ):
        assert name in TABLE


def test_no_public_callable_takes_any_keyword() -> None:
    taking = [name for name, called in TABLE.items() if any(p.kind is p.VAR_KEYWORD for p in parameters(called).values())]
    assert taking == []


def raised(called: Callable[..., Any], keyword: str) -> str:
    """The error of a call with this keyword; empty if there is none, or another than of a keyword."""
    try:
        called(*arguments(called), **{keyword: 1})
    except TypeError as error:  # KeywordError is one
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_unknown_keyword_raises() -> None:
    assert [name for name, called in TABLE.items() if "bogus_keyword" not in raised(called, "bogus_keyword")] == []


def test_a_misspelled_option_names_the_one_that_was_meant() -> None:
    options = {name: misspelled(called) for name, called in TABLE.items()}
    assert sum(option is not None for option in options.values()) > 140
    silent = list[str]()
    for name, option in options.items():
        if option is not None:
            wrong, meant = option
            expected = rf"^KeywordError: .*unknown keyword '{wrong}'; did you mean .*\b{meant}\b"
            if not re.search(expected, raised(TABLE[name], wrong)):
                silent.append(name)
    assert silent == []


@pytest.mark.parametrize(
    ("method", "wrong", "says"),
    [
        ("__call__", "atention_mask", "attention_mask"),
        ("__call__", "attn_mask", "attention_mask"),
        ("__call__", "labels", "model.loss"),
        ("__call__", "position_ids", "positions="),
        ("__call__", "inputs_embeds", "patch="),
        ("__call__", "past_key_values", "dt.Pool"),
        ("loss", "labels", "targets"),
        ("generate", "temprature", "temperature"),
        ("generate", "max_new_tokens", "max_tokens="),
        ("generate", "patchs", "patch"),
        ("trace", "patches_", "patch"),
    ],
)
def test_a1_keywords_that_were_swallowed_raise(method: str, wrong: str, says: str) -> None:
    model = dt.build(dt.load_spec("llama-tiny"))
    with pytest.raises(KeywordError, match=says):
        getattr(model, method)(torch.tensor([[1, 2, 3]]), **{wrong: 2})


def test_a1_options_that_belong_to_text_are_refused_for_ids_and_the_reverse() -> None:
    model = dt.build(dt.load_spec("llama-tiny"))
    with pytest.raises(dt.DovetailError, match="chat: renders messages of text"):
        model.generate([1, 2], 1, chat=True)
    with pytest.raises(dt.DovetailError, match="system: renders messages of text"):
        model.generate([1, 2], 1, system="Be brief.")
    with pytest.raises(dt.DovetailError, match="patches: belong to token ids"):
        model.generate("text", 1, patches=torch.zeros(1, 3, 4, 4))


def test_the_signature_stays_readable() -> None:
    assert inspect.signature(dt.train) == inspect.signature(inspect.unwrap(dt.train))
    assert dt.train.__doc__
    assert {"inputs", "ctx", "attention_mask", "source"} <= parameters(dt.Transformer.forward).keys()


def test_keywords_of_other_libraries_are_none_of_ours() -> None:
    ours = parameters(dt.Transformer.forward).keys() | parameters(dt.Transformer.generate).keys()
    assert ours & ELSEWHERE.keys() == set()
