"""A figure that is written twice has the same bytes, so that a picture in a repository changes only with its data."""

from pathlib import Path

import pytest

from dovetail.views.figure import FORMATS, new_figure, write_figure


@pytest.mark.parametrize("form", FORMATS)
def test_a_figure_has_the_same_bytes_whenever_it_is_written(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("a", "0"), ("b", "86400")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)  # the time that matplotlib writes, where it writes one
        figure = new_figure(3, 2)
        figure.subplots().plot([1, 2, 3], label="a curve")
        write_figure(figure, tmp_path / f"{name}.{form}")
    assert (tmp_path / f"a.{form}").read_bytes() == (tmp_path / f"b.{form}").read_bytes()
