"""One declaration per verb: flags, keys of a run file, the tables of the reference and the checks of a call follow from the
signature of the verb's function. Verbs and options are found by introspection, so that none is left out."""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

import dovetail as dt
from dovetail.api.run_file import IN_CALLS_ONLY
from dovetail.base.errors import DovetailError, UsageError
from dovetail.base.option import Parameter, declared, in_python, parameters
from dovetail.base.value import alternatives, values_of
from dovetail.cli import VERBS
from dovetail.cli.command import command_of
from dovetail.cli.parser import flag_names, parse

ROOT = Path(__file__).parents[1]
COMMANDS = {verb: command_of(verb) for verb in VERBS}
FUNCTIONS = {function.__name__: function for command in COMMANDS.values() for function in command.functions}
OF_COMMANDS = {"json", "jsonl", "html", "force", "load"}  # options of the command line
PYTHON_ONLY = {  # parameters without a flag: what they hold is no text, or another verb's
    "match": {"by"},  # --params, --flops, --kv
    "graft": {"spec", "quiet"},
    "quantize": {"speed"},
    "laws": {"load"},  # --load, of every verb
    "build_data": {"executor"},
    "train": {"chats", "options", "epochs", "recorded", "quiet"},  # of tune, of a run file, of the command line's bar
    "generate": {"choice", "grammar"},
    "serve": {"adapters"},
    "check_node": {"directory"},  # --node
}
WRITTEN_FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
OPTIONS = [(verb, name) for verb, command in COMMANDS.items() for name in command.options]


def flags(option: Parameter) -> list[str]:
    name = option.key.replace("_", "-")
    if option.option.argument or option.variadic:
        return []
    short = [option.option.short] if option.option.short else []
    return [f"--{name}", *short, *([f"--no-{name}"] * (option.default is True))]


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_the_options_of_the_signatures(verb: str) -> None:
    command = COMMANDS[verb]
    of_functions: dict[str, Parameter] = {}
    for function in command.functions:  # of two engines or plans, the first declares what both have
        of_functions = declared(function) | of_functions
    own = {} if command.module is None else declared(command.module.run)
    assert own.keys() & of_functions.keys() <= OF_COMMANDS, "declared twice"
    assert command.options.keys() - of_functions.keys() - own.keys() <= OF_COMMANDS
    assert of_functions.keys() | own.keys() <= command.options.keys()
    expected = {"--help", *(flag for option in command.options.values() for flag in flags(option))}
    assert set(flag_names(command.options)) == expected
    for name, option in of_functions.items():
        used = command.options[name]
        assert (used.hint, used.option) == (option.hint, option.option) or name in own.keys() | OF_COMMANDS
        assert used.default == option.default or option.required


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_parameter_is_an_option_or_only_for_python(name: str) -> None:
    undeclared = {key: option for key, option in parameters(FUNCTIONS[name]).items() if not option.option.help}
    values = {key for key, option in undeclared.items() if not all(map(is_callback, alternatives(option.hint)))}
    assert values == PYTHON_ONLY.get(name, set())


def is_callback(hint: Any) -> bool:
    return get_origin(hint) is collections.abc.Callable


def test_the_reference_has_the_help_of_every_verb_and_the_options_of_every_function() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    reference = importlib.import_module("reference")
    pages = {"commands": list(reference.commands()), "python": list(reference.python())}
    text = "\n".join(pages["commands"])
    for verb, command in COMMANDS.items():
        section = " ".join(text.partition(f"## dovetail {verb}\n")[2].partition("\n## ")[0].split())
        for option in command.options.values():
            assert all(flag in section for flag in flags(option))
            assert " ".join(option.option.help.split()) in section, (verb, option.name)
            if isinstance(option.default, int | float) and not isinstance(option.default, bool) and not option.required:
                assert f"(default: {option.default})" in section, (verb, option.name)
    for name in FUNCTIONS.keys() & set(dt.__all__):
        section = "\n".join(pages["python"]).partition(f"### dt.{name}\n")[2].partition("\n### ")[0]
        for key, option in declared(FUNCTIONS[name]).items():
            assert f"`{key}`" in section, (name, key)
            assert option.option.help.replace("|", "\\|") in section, (name, key)


def wrong_values(option: Parameter) -> Iterator[tuple[str, object]]:
    """(a text of the command line, the same value in Python) that an option refuses."""
    bounds, kinds = option.option, alternatives(option.hint)
    whole = int in kinds and float not in kinds
    if isinstance(option.default, bool):
        return
    if (int in kinds or float in kinds) and str not in kinds and bounds.read is None:
        yield "x", "x"
        for bound, beyond in ((bounds.low, -1), (bounds.high, 1)):
            if abs(bound) != float("inf"):
                value = bound + beyond
                yield str(value), int(value) if whole else float(value)
    if values_of(option.hint) and all(get_origin(kind) is Literal for kind in kinds):
        yield "bogus", "bogus"


def required(function: Callable[..., Any]) -> dict[str, Any]:
    """A value of the right type for each parameter that a call must have."""
    needed = [option for option in parameters(function).values() if option.required]
    return {option.name: next(value for value in ("x", 1) if option.problem(value) is None) for option in needed}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(DovetailError) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize(("verb", "name"), OPTIONS)
def test_a_wrong_value_is_refused_alike_on_the_command_line_and_in_a_call(verb: str, name: str) -> None:
    command = COMMANDS[verb]
    option = command.options[name]
    for text, value in wrong_values(option):
        problem = option.problem(value)
        assert problem is not None
        arguments = [one.name for one in command.options.values() if one.option.argument]
        words = [*["x"] * arguments.index(name), text] if option.option.argument else [f"{flags(option)[0]}={text}"]
        said = message(lambda words=words: parse(verb, "", command.options, words))
        shown = option.option.form if option.option.argument else flags(option)[0]
        assert said == f"{verb}: {shown}: {problem}; see dovetail {verb} --help"
        for function in command.functions:
            if name in declared(function) and function.__name__ in dt.__all__:
                public = getattr(dt, function.__name__)
                given = {**required(function), name: value}
                assert message(lambda public=public, given=given: public(**given)) == f"{name}: {problem}"


def test_wrong_values_are_tried_on_most_numbers_and_choices() -> None:
    tried = [name for verb, name in OPTIONS if any(wrong_values(COMMANDS[verb].options[name]))]
    assert len(tried) > 120


@pytest.mark.parametrize("name", [name for name in parameters(FUNCTIONS["train"]) if name not in IN_CALLS_ONLY])
def test_a_key_of_a_run_file_is_a_parameter_with_its_type_and_bounds(name: str) -> None:
    option = parameters(FUNCTIONS["train"])[name]
    for _, value in (*wrong_values(option), ("", object)):
        problem = option.problem(value)
        if problem is not None:
            data = {"spec": "llama-tiny", option.key: value}
            assert message(lambda data=data: dt.train(data)) == f"run: {option.key}: {problem}"
    near = f"{option.key}x"
    assert "is not a key of a run; did you mean " in message(lambda: dt.train({"spec": "llama-tiny", near: 1}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_of_a_call_writes_no_flag(name: str) -> None:
    function = FUNCTIONS[name]
    written = " ".join(flag for option in declared(function).values() for flag in flags(option))
    assert not WRITTEN_FLAG.search(in_python(written, function))


def errors_of(path: Path) -> Iterator[str]:
    """The texts of the errors that a file raises, without what is computed in them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [part for part in ast.walk(node.exc) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield " ".join(str(part.value) for part in sorted(parts, key=lambda part: (part.lineno, part.col_offset)))


@pytest.mark.parametrize("path", sorted((ROOT / "src" / "dovetail" / "api").glob("*.py")), ids=lambda path: path.stem)
def test_the_flags_of_an_error_are_options_of_a_function_that_raises_it(path: Path) -> None:
    public = {name: inspect.unwrap(getattr(dt, name)) for name in dt.__all__ if inspect.isfunction(getattr(dt, name))}
    functions = [public[path.stem]] if path.stem in public else list(public.values())
    for text in errors_of(path):
        left = [WRITTEN_FLAG.findall(in_python(text, function)) for function in functions]
        assert [] in left, (text, min(left, key=len))


def test_usage_errors_have_the_exit_code_of_usage() -> None:
    assert UsageError.exit_code == 2
    assert inspect.signature(dt.train) == inspect.signature(FUNCTIONS["train"])
