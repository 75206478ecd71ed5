import pytest
import torch

from dovetail.base.errors import DovetailError, FileError, NonFiniteError, SpecError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.views.map import attention_of, draw_map

matplotlib = pytest.importorskip("matplotlib")

SPEC = from_yaml("{dovetail: 1, width: 28, vocab: 62, layers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}}]}")


def test_a_layer_counts_from_either_end():
    model, tokens = build(SPEC), torch.tensor([5, 17, 3, 60])
    last = attention_of(model, tokens, 2)
    assert last.shape == (6, 4, 4)
    assert torch.equal(attention_of(model, tokens, -1), last)
    assert not torch.equal(attention_of(model, tokens, 0), last)
    with pytest.raises(SpecError, match="there is no such layer"):
        attention_of(model, tokens, 3)


def test_a_pattern_that_is_not_finite_is_refused():
    model = build(SPEC)
    with torch.no_grad():
        model.layers[1].mixer.q.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mixer\.pattern: holds nan"):
        attention_of(model, torch.tensor([5, 17, 3]), 1)


@pytest.mark.parametrize("count", [0, 97])
def test_a_text_that_no_picture_can_hold_is_refused_before_it_is_read(count):
    with pytest.raises(DovetailError, match=f"{count} tokens do not fit a map; give a text of 1 to 96 tokens"):
        attention_of(build(SPEC), torch.zeros(count, dtype=torch.long), 0)


def dark(path):
    """The share of a picture that is neither white nor nearly."""
    picture = matplotlib.image.imread(path)[..., :3]
    return float((picture.min(-1) < 0.5).mean())


def test_attended_tokens_are_dark(tmp_path):
    labels = [f"t{i}" for i in range(7)]
    draw_map(torch.eye(7).expand(2, 7, 7), labels, [0, 1], tmp_path / "self.png", "each at itself")
    draw_map(torch.full((2, 7, 7), 1 / 7), labels, [0, 1], tmp_path / "even.png", "each at all")
    draw_map(torch.ones(2, 7, 7), labels, [0, 1], tmp_path / "full.png", "all dark")
    assert dark(tmp_path / "even.png") < dark(tmp_path / "self.png") < dark(tmp_path / "full.png")


def test_one_head_makes_a_smaller_picture_than_six(tmp_path):
    pattern, labels = torch.rand(6, 5, 5), ["·word"] * 5
    for name, heads in (("one", [4]), ("six", range(6))):
        draw_map(pattern, labels, heads, tmp_path / f"{name}.png", name)
    one, six = (matplotlib.image.imread(tmp_path / f"{name}.png").shape for name in ("one", "six"))
    assert one[0] * one[1] < six[0] * six[1]


def test_labels_are_drawn_as_they_are_not_as_formulas(tmp_path):
    draw_map(torch.rand(1, 3, 3), ["$x^", "_$", "漢"], [0], tmp_path / "odd.png", "$5 and $6")
    assert (tmp_path / "odd.png").stat().st_size > 1000


def test_an_illegal_figure_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"heads\.6: there is no such head"):
        draw_map(torch.rand(6, 3, 3), ["a"] * 3, [0, 6], tmp_path / "x.png", "")
    with pytest.raises(FileError, match=r"x\.docx: \.docx is not a format of pictures; formats: \.png"):
        draw_map(torch.rand(6, 3, 3), ["a"] * 3, [0], tmp_path / "x.docx", "")
    assert not list(tmp_path.iterdir())
