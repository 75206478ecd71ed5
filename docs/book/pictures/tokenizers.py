"""Four tokenizers of 600 tokens, trained on four fifths of the library's license and measured on the rest."""

from pathlib import Path

from dovetail.text.learn import learn

VOCAB = 600
UNKNOWN = 2  # the id, of the kinds that have one
KINDS = {"characters": True, "byte_pair": False, "unigram": False, "words": True}  # whether there is an unknown token


def data():
    """By tokenizer: bytes per token of text that it has not seen, and percent of tokens that are unknown."""
    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    cut = len(text) * 4 // 5
    by_kind = {}
    for kind, has_unknown in KINDS.items():
        ids = learn(text[:cut], VOCAB, kind).encode(text[cut:])
        unknown = int((ids == UNKNOWN).sum()) if has_unknown else 0
        by_kind[kind] = {"bytes per token": len(text[cut:].encode()) / len(ids), "unknown %": 100 * unknown / len(ids)}
    return by_kind


def draw(figure, data):
    """Two panels of bars."""
    for axes, name, color in zip(figure.subplots(1, 2), ("bytes per token", "unknown %"), ("#2f5fb3", "#d9822b"), strict=True):
        values = [row[name] for row in data.values()]
        axes.barh([kind.replace("_", "-") for kind in data], values, color=color)
        for place, value in enumerate(values):
            axes.text(value + 0.02 * max(values), place, f"{value:.1f}", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set(xlabel=name, xlim=(0, 1.15 * max(values)))
