"""Python source: templates with optional lines, calls wrapped within a width, names that never clash."""

from __future__ import annotations

import pytest

from dovetail.codegen.code import WIDTH, Call, File, fill, signature, wrapped

TEMPLATE = """
always = $value
gated = 1  # a comment stays  #? gate
plain = 2  #? not gate
both = 3  #? gate wide
neither = 4  #? not gate not wide
"""


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({}, ["always = 7", "plain = 2", "neither = 4"]),
        ({"gate": True}, ["always = 7", "gated = 1  # a comment stays"]),
        ({"gate": True, "wide": 2.0}, ["always = 7", "gated = 1  # a comment stays", "both = 3"]),
        ({"gate": False, "wide": True}, ["always = 7", "plain = 2"]),
    ],
)
def test_lines_go_by_their_flags(flags: dict[str, object], kept: list[str]) -> None:
    assert fill(TEMPLATE, flags, value=7).split("\n") == kept


def test_the_longer_placeholder_is_filled_first() -> None:
    assert fill("$norm $norm_eps", norm="a", norm_eps="b") == "a b"


def test_a_call_is_laid_out_as_wide_as_it_fits() -> None:
    short = Call.to("f", a=1, b=2.5, c=None)
    assert wrapped("x = ", short, "", 4) == "x = f(a=1, b=2.5)"
    names = {f"argument_{i}": i for i in range(6)}
    middle = wrapped("x = ", Call.to("function", **names), "", 8)
    assert middle.split("\n") == [
        "x = function(",
        " " * 12 + ", ".join(f"{key}={value}" for key, value in names.items()),
        " " * 8 + ")",
    ]
    long = wrapped("x = ", Call.to("f", first=short, **{f"argument_{i}": i for i in range(9)}), "", 4)
    assert long.split("\n")[1] == " " * 8 + "first=f(a=1, b=2.5),"
    assert all(len(line) <= WIDTH for line in long.split("\n"))


def test_an_open_call_opens_what_holds_it() -> None:
    text = wrapped("", Call.to("outer", inner=Call.to("inner", a=1).opened()), "", 0)
    assert text == "outer(\n    inner=inner(\n        a=1,\n    ),\n)"


def test_an_argument_can_be_changed() -> None:
    assert Call.to("Norm", dim=28, eps=1e-5).change(dim="head").flat() == "Norm(dim=head, eps=1e-05)"


def test_a_signature_is_laid_out_too() -> None:
    assert signature("forward", ["x: Tensor"], "Tensor") == "def forward(self, x: Tensor) -> Tensor:"
    long = signature("__init__", [f"argument_{i}: nn.Module" for i in range(6)]).split("\n")
    assert [long[0], long[1], long[-1]] == ["def __init__(", " " * 8 + "self,", "    ):"]


def test_equal_texts_share_a_name_and_others_get_their_own() -> None:
    file = File()
    assert file.define("Norm", "class $name: 1") == "Norm"
    assert file.define("Norm", "class $name: 1") == "Norm"
    assert file.define("Norm", "class $name: 2") == "Norm2"
    assert file.define("Norm", "class $name: 3", "Other") == "Other"
    assert file.define("Norm", "class $name: 4", "Other") == "Other2"
    assert file.define("Norm", "class $name: 2") == "Norm2"
    assert list(file.definitions) == ["Norm", "Norm2", "Other", "Other2"]
    assert file.definitions["Other2"] == "class Other2: 4"
