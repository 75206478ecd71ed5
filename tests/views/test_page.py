"""Pages of show and diff: self-contained, escaped, readable in light and dark, and with every part and its figures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import get_args

import pytest
from jinja2 import UndefinedError

import dovetail as dt
from dovetail.files.spec import load_spec
from dovetail.proof.compare.comparison import Status as TapStatus
from dovetail.proof.rollouts.verdict import RolloutStatus
from dovetail.views.page import TEMPLATES, Page, body
from dovetail.weights.surgery import Status

VOID = {"meta", "br", "hr", "img", "input", "link"}
READABLE = 4.5  # WCAG 2, level AA
CSS = (TEMPLATES / "page.css").read_text()
# name -> (light, dark); status -> the color of its badge
LIGHT, DARK = (dict(re.findall(r"--(\w+):(#\w{6})", block)) for block in re.findall(r"\.dovetail\{(\s*--.*?)\}", CSS, re.S))
COLORS = {name: (LIGHT[name], DARK[name]) for name in LIGHT}
BADGES = {
    name: color
    for selectors, color in re.findall(r"^([^{}\n]+)\{background:(#\w{6})\}$", CSS, re.M)
    for name in re.findall(r"\.dovetail \.([\w-]+)", selectors)
}
BADGE = re.search(r"\.badge\{[^}]*color:(#\w{6})", CSS)[1]  # type: ignore[index]
STATUSES = {*get_args(Status), *get_args(TapStatus), *get_args(RolloutStatus), "changed"}


class Checker(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are nested."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("ink", ["ink", "soft", "accent"])
@pytest.mark.parametrize("ground", ["page", "card", "inner", "first", "changed"])
def test_text_is_readable_on_every_ground(ink: str, ground: str, scheme: int) -> None:
    assert contrast(COLORS[ink][scheme], COLORS[ground][scheme]) >= READABLE


@pytest.mark.parametrize("name", sorted(STATUSES))
def test_text_on_badges_is_readable(name: str) -> None:
    assert contrast(BADGE, BADGES[name]) >= READABLE


def test_every_color_has_a_dark_one() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert len(LIGHT) == 10


def test_the_contrast_is_the_one_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # a gray that is just too faint


def pages() -> dict[str, str]:
    changed = dt.diff("llama-tiny", "gpt2-tiny")
    return {
        "show": dt.show("llama-tiny").to_html(),
        "encoder": dt.show("t5-tiny").to_html(),
        "diff": changed.to_html(),
        "same": dt.diff("llama-tiny", "llama-tiny").to_html(),
        "notebook": changed._repr_html_(),
    }


@pytest.mark.parametrize("name", ["show", "encoder", "diff", "same", "notebook"])
def test_pages_are_whole_and_fetch_nothing(name: str) -> None:
    source = pages()[name]
    checker = Checker(source)
    assert "http" not in source
    assert not {tag for tag, _ in checker.tags} & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"url\(|@import", source)
    assert "prefers-color-scheme:dark" in source
    colors = set(re.findall(r"(?<![&\w])#[0-9a-f]{3,8}\b", source))
    assert colors <= {color for pair in COLORS.values() for color in pair} | set(BADGES.values()) | {BADGE}
    if name != "notebook":
        assert source.startswith("<!doctype html>")
        assert ("meta", {"name": "viewport", "content": "width=device-width,initial-scale=1"}) in checker.tags


def test_a_fragment_restyles_nothing_around_it() -> None:
    rules = re.sub(r"@media\([^)]*\)\s*\{", "", re.search(r"<style>(.*?)</style>", Page("t", "x").fragment(), re.S)[1])  # type: ignore[index]
    selectors = [one for rule in re.findall(r"([^{}]+)\{[^{}]*\}", rules) for one in rule.split(",")]
    assert len(selectors) > 20
    assert all(one.strip().startswith(".dovetail") for one in selectors), selectors


def test_names_cannot_break_a_page() -> None:
    bad = "<script>alert(1)</script>\x1b[2J\"'&"
    row = {
        "verdict": SimpleNamespace(status="equal"),
        "headline": bad,
        "sides": [(bad, bad, bad)],
        "measures": bad,
        "lines": [bad],
    }
    table = {"columns": [bad], "rows": [[bad]], "numbers": [bad], "marked": [0]}
    for source in (Page(bad, bad).whole(), Page(bad, bad).fragment(), Page("t", body("verify.html", **row, **table)).whole()):
        checker = Checker(source)
        assert "script" not in {tag for tag, _ in checker.tags}
        assert "\x1b" not in source
        assert "<script>" in "".join(checker.words)


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="body"):
        body("fragment.html")


def test_a_name_from_outside_is_escaped_in_both_pages(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "<img src=x onerror=y>.yaml"
    path.write_text("{width: 64, vocab: 90, layers: [{mixer: {heads: 4}}]}")
    for source in (dt.show(path).to_html(), dt.diff(path, path).to_html()):
        assert "img" not in {tag for tag, _ in Checker(source).tags}


def test_show_has_every_part_with_shapes_and_costs() -> None:
    checker = Checker(dt.show("llama-tiny").to_html())
    words = "".join(checker.words)
    for expected in ("layers 0–5 ×6", "attention", "heads 8", "q.weight", "256 × 256", "704 × 256", "4,361,472"):
        assert expected in words
    assert "14.75 MFLOP per token" in words  # of six layers: matmul and attention
    assert "3.00 MiB KV cache" in words
    assert "49.88 KiB recurrent state" in "".join(Checker(dt.show("rwkv6-tiny").to_html()).words)
    assert sum(tag == "details" for tag, _ in checker.tags) >= 7
    opened = [attrs for tag, attrs in checker.tags if tag == "details" and "open" in attrs]
    assert 0 < len(opened) < 7


def test_diff_sets_parts_side_by_side() -> None:
    spec = load_spec("llama-tiny")
    checker = Checker(dt.diff(spec, spec.set("layers.2.mixer.kv_heads", 1)).to_html())
    words = " ".join(checker.words)
    for expected in ("layers 0–1 ×2", "layers 2", "layers 3–5 ×3", "kv_heads 2 → 1: the mean of every 2", "(64, 256)"):
        assert expected in words
    differing = [attrs for _, attrs in checker.tags if (attrs.get("class") or "").split() == ["pair", "differs"]]
    assert len(differing) == 1
    assert "changed" not in " ".join(Checker(dt.diff(spec, spec).to_html()).words)


def test_a_part_that_is_new_or_dropped_has_an_empty_side() -> None:
    words = " ".join(Checker(dt.diff("llama-tiny", "gpt2-tiny").to_html()).words)
    assert "layers 4–5 ×2" in words
    assert "dropped" in words
    words = " ".join(Checker(dt.diff("gpt2-tiny", "llama-tiny").to_html()).words)
    assert "layers 4–5 ×2" in words
    assert "34 new" not in words
