"""Curves in braille: a point is at its place, and each curve is named at its end."""

from dovetail.views.runs import draw_terminal


def test_a_falling_curve_begins_at_the_top_and_ends_at_the_bottom() -> None:
    lines = draw_terminal(
        {"a": [(0.0, 4.0), (50.0, 3.0), (100.0, 1.0)], "b": [(0.0, 2.0), (100.0, 2.0)]}, 40, 6
    ).plain.splitlines()
    assert lines[0].startswith("4.000 ┤⠉")
    assert lines[5].startswith("1.000 ┤")
    assert lines[5].endswith(" a")
    assert lines[3].endswith("⣀ b"), "2 is two thirds of the way down: the lowest dots of the fourth row"
    assert lines[6].split() == ["0", "100"]


def test_one_point_and_none() -> None:
    assert draw_terminal({"a": [(5.0, 1.0)]}, 30, 3).plain.count("a") == 1
    assert draw_terminal({"a": []}, 30).plain == ""
