from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import DovetailError
from dovetail.files.spec import from_yaml
from dovetail.look.sweeps import Sweep
from dovetail.views.heat import Heat, draw_heat, heat_page, lens_heat
from dovetail.views.map import attention_of, draw_map

pytest.importorskip("matplotlib")

HYBRID = from_yaml("{width: 28, vocab: 62, layers: [{mixer: {kind: mamba2, inner: 60, head: 6}}, {mixer: {kind: lstm}}]}")


def heat(values: Tensor, **more: object) -> Heat:
    rows, columns = ([f"{axis}{i}" for i in range(size)] for axis, size in zip("rc", values.shape[1:], strict=True))
    names = [f"head {i}" for i in range(len(values))]
    return Heat("title", "attention prob", names, values, rows, columns)._replace(**more)  # type: ignore[arg-type]


def data_of(page: str) -> dict[str, object]:
    return json.loads(re.search(r'class="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]


@pytest.mark.parametrize("low", [0.0, -2.0])
def test_the_page_holds_the_values_to_one_byte(low: float) -> None:
    values = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(0)) * (1 - low) + low
    values[1, 2, 3] = 0
    data = data_of(heat_page(heat(values)).whole())
    tiles = torch.frombuffer(bytearray(base64.b64decode(str(data["tiles"]))), dtype=torch.uint8).float().view(3, 5, 4)
    root = (tiles - 128) / 127 if data["signed"] else tiles / 255
    got = root * root.abs() * float(data["limit"])  # type: ignore[arg-type]
    assert (got - values).abs().max() < 0.01 * float(data["limit"])  # type: ignore[arg-type]
    assert got[1, 2, 3] == 0


def test_a_page_of_8_heads_and_512_tokens_is_below_3_mb_and_fetches_nothing(tmp_path: Path) -> None:
    values = torch.rand(8, 512, 512)
    draw_heat(heat(values), tmp_path / "map.html")
    source = (tmp_path / "map.html").read_text()
    assert len(source.encode()) < 3_000_000
    assert not re.search(r"https?:|src=|@import|url\(", source)
    with pytest.raises(DovetailError, match=r"512 tokens do not fit a map; .* 1 to 96 tokens, or write an \.html page"):
        draw_heat(heat(values), tmp_path / "map.png")
    with pytest.raises(DovetailError, match="heads: 65 panels do not fit a map; name up to 64 of them"):
        draw_heat(heat(torch.rand(65, 2, 2)), tmp_path / "many.html")


def test_names_are_data_and_not_markup() -> None:
    bad = "</script><script>alert(1)</script>\x1b[2J\"'&"
    page = heat_page(
        heat(torch.rand(2, 1, 1), title=bad, what=bad, panels=[bad, bad], rows=[bad], columns=[bad], words=[bad])
    ).whole()
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "\x1b" not in page
    assert "\\u001b" not in page


def test_effective_attention_and_its_absence() -> None:
    model, tokens = dt.build(HYBRID), torch.tensor([5, 17, 3, 60])
    assert attention_of(model, tokens, 0).shape == (10, 4, 4)
    with pytest.raises(DovetailError, match="lstm computes no attention pattern"):
        attention_of(model, tokens, 1)


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_signed_maps_lenses_and_sweeps_are_drawn(tmp_path: Path, suffix: str) -> None:
    labels = ["$x^", "<b>", "漢"]
    draw_map(torch.randn(2, 3, 3), labels, [0, 1], tmp_path / f"signed.{suffix}", "effective")
    model, ids = dt.build(HYBRID), torch.tensor([[5, 17, 3]])
    lens = dt.look.lens(model, ids, top=1)
    draw_heat(lens_heat(lens, labels, ["w"] * 9, "lens"), tmp_path / f"lens.{suffix}")
    result = Sweep({f"layers.{i}.in[pos={j}]": i - 0.7 * j for i in range(2) for j in range(3)}, 1.0, 0.0)
    dt.draw(result, tmp_path / f"sweep.{suffix}", labels=labels)
    assert all((tmp_path / f"{name}.{suffix}").stat().st_size > 1000 for name in ("signed", "lens", "sweep"))
    with pytest.raises(DovetailError, match="exists already"):
        dt.draw(result, tmp_path / f"sweep.{suffix}")
    with pytest.raises(DovetailError, match="labels: there are 2; the sweep has 3 indices per address"):
        dt.draw(result, tmp_path / "other.png", labels=labels[:2])
