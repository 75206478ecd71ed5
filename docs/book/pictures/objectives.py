"""What three objectives read and predict of the same sixteen words."""

import torch

import dovetail as dt
from dovetail.training.denoising import SpanCorruption
from dovetail.training.objective import IGNORED, MaskedTokens

SIZE = (8.0, 3.4)
WORDS = ["it", "was", "the", "best", "of", "times", "it", "was", "the", "worst", "of", "times", "it", "was", "the", "age"]
VOCAB = sorted(set(WORDS))
NAMES = [*VOCAB, "[mask]", "<0>", "<1>", "<end>"]
MASK, SENTINELS, END = len(VOCAB), (len(VOCAB) + 1, len(VOCAB) + 2), len(VOCAB) + 3
SEED = 280  # of which two words are masked, one replaced and one kept


def spelled(ids):
    """The words of ids; nothing where a token is not predicted."""
    return ["" if i == IGNORED else NAMES[i] for i in ids.tolist()]


def data():
    """By objective: the words that are read, and those that are predicted."""
    row = torch.tensor([[VOCAB.index(word) for word in WORDS]])
    layout = dt.TokenLayout.whole(1, len(WORDS))
    seen, labels = MaskedTokens(MASK, len(VOCAB)).corrupt(row, layout, SEED)
    spans = SpanCorruption(end=END, sentinels=SENTINELS, fraction=0.25, span=2.0).corrupt(row, layout, 1)
    return {
        "next token": {"reads": WORDS, "predicts": [*WORDS[1:], ""]},
        "masked tokens": {"reads": spelled(seen[0]), "predicts": spelled(labels[0])},
        "spans": {"reads": spelled(spans.source[0]), "predicts": spelled(spans.target[0])},
    }


def draw(figure, data):
    """Six lines of words."""
    axes = figure.subplots()
    top = 0.0
    for name, lines in data.items():
        axes.text(-0.6, top, name, ha="right", va="center", fontsize=9, fontweight="bold")
        for line, words in lines.items():
            axes.text(-0.6, top + 0.9, line, ha="right", va="center", fontsize=8) if line == "predicts" else None
            for place, word in enumerate(words):
                special = word.startswith(("[", "<")) or (line == "reads" and name == "masked tokens" and word != WORDS[place])
                face = "#d9822b" if special else "#e9edf5" if line == "reads" else "#c9d8f2"
                if word:
                    box = {
                        "boxstyle": "round,pad=0.25",
                        "facecolor": face,
                        "edgecolor": "#1f2430",
                        "linewidth": 1.2 if special else 0.3,
                    }
                    axes.text(
                        place, top + (0.9 if line == "predicts" else 0), word, ha="center", va="center", fontsize=7.5, bbox=box
                    )
        top += 2.6
    axes.set(xlim=(-3.2, len(WORDS) - 0.4), ylim=(top - 1.2, -0.8))
    axes.axis("off")
