import dataclasses as dc

import pytest
import torch

from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.training.loop import evaluate, train
from dovetail.training.objective import MaskedTokens, classify, next_token, seq2seq
from dovetail.training.plan import Plan

SEQ2SEQ = """
dovetail: 1
width: 28
vocab: 22
position: {kind: sinusoidal}
encoder:
  width: 20
  vocab: 22
  position: {kind: sinusoidal}
  head: null
  layers: [{mixer: {heads: 2, mask: full, position: none}, ffn: {hidden: 44}}]
layers:
- mixer: {heads: 2, position: none}
  cross: {kind: cross_attention, heads: 2}
  ffn: {hidden: 44}
"""


def draw(shape, top, seed):
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def test_masked_tokens_have_their_fractions():
    objective = MaskedTokens(mask=61, vocab=61)
    tokens = draw((40, 100), 50, 0)
    layout = TokenLayout.whole(40, 100)
    hidden = replaced = kept = chosen = untouched = 0
    for seed in range(100):
        seen, labels = objective.corrupt(tokens, layout, seed)
        asked = labels >= 0
        assert torch.equal(labels[asked], tokens[asked])
        assert torch.equal(seen[~asked], tokens[~asked])
        untouched += int((~asked).sum())
        chosen += int(asked.sum())
        hidden += int((seen[asked] == 61).sum())
        kept += int((seen[asked] == tokens[asked]).sum())
        replaced += int(((seen[asked] != tokens[asked]) & (seen[asked] != 61)).sum())
    # 400,000 draws: three standard deviations of a share of 0.15 are 0.0017, of those within the chosen 0.005
    assert chosen / (chosen + untouched) == pytest.approx(0.15, abs=0.0017)
    assert hidden / chosen == pytest.approx(0.8, abs=0.005)
    assert replaced / chosen == pytest.approx(0.1 * 60 / 61, abs=0.005)  # one replacement in 61 is the token itself
    assert kept / chosen == pytest.approx(0.1 + 0.1 / 61, abs=0.005)


def test_the_same_seed_hides_the_same_tokens_and_padding_is_left_alone():
    objective = MaskedTokens(mask=3, vocab=62)
    tokens, layout = draw((9, 31), 62, 1), TokenLayout.padded([31, 7, 2, 19, 31, 30, 1, 5, 8], 31)
    real = layout.real
    first, again, other = (objective.corrupt(tokens, layout, seed) for seed in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][~real], tokens[~real])
    assert (first[1][~real] == -100).all()
    assert (first[1][real] >= 0).any()


def test_padding_has_no_labels(tiny):
    model, layout = build(tiny), TokenLayout.padded([7, 3], 7)
    tokens, labels = draw((2, 7), 62, 2), draw((2, 7), 62, 3)
    one = next_token(model, Batch(tokens, labels, layout), 0, False)
    two = next_token(model, Batch(tokens, labels.masked_fill(~layout.real, 11), layout), 0, False)
    three = next_token(model, Batch(tokens, labels.masked_fill(layout.real, 11), layout), 0, False)
    assert one == two
    assert one != three


def test_dropout_is_drawn_from_the_seed_and_in_training_alone(tiny):
    model = build(tiny.replace("dropout", 0.3))
    batch = Batch(draw((2, 7), 62, 2), draw((2, 7), 62, 3), TokenLayout.whole(2, 7))
    losses = [next_token(model, batch, seed, training).mean().item() for seed, training in ((1, True), (1, True), (2, True))]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(next_token(model, batch, 1, False).sum, next_token(model, batch, 2, False).sum)


@pytest.mark.slow
def test_masked_tokens_are_learned():
    """Rows go up by one: a hidden token is known from its neighbors on both sides."""
    spec = from_yaml(
        "{dovetail: 1, width: 28, vocab: 22, head: masked_lm, layers: "
        "[{repeat: 2, mixer: {heads: 2, mask: full}, ffn: {hidden: 44}}]}"
    )

    def batch(step):
        rows = (draw((16, 1), 20, step) + torch.arange(9)) % 20
        return Batch(rows, rows, TokenLayout.whole(16, 9))

    objective = MaskedTokens(mask=21, vocab=20)
    model = build(spec)
    held = [batch(10_000 + i) for i in range(4)]
    before = evaluate(model, held, objective)
    train(model, batch, objective, Plan(steps=400, learning_rate=3e-3, warmup_steps=20, quiet=True))
    assert before > 2.9  # ln 20 is 3.0
    assert evaluate(model, held, objective) < 1.0


def test_classes_are_learned():
    """Whether a row holds a 7: rows of different lengths, padded."""
    spec = from_yaml(
        "{dovetail: 1, width: 28, vocab: 13, head: {kind: classifier, classes: 2, pooling: mean}, "
        "layers: [{mixer: {heads: 2, mask: full}, ffn: {hidden: 44}}]}"
    )

    def batch(step):
        lengths = (3 + draw((24,), 7, step + 1)).tolist()
        layout = TokenLayout.padded(lengths, 9)
        tokens = draw((24, 9), 13, step).masked_fill(~layout.real, 7)  # padding must not count
        return Batch(tokens, ((tokens == 7) & layout.real).any(-1).long(), layout)

    model = build(spec)
    held = [batch(10_000 + i) for i in range(4)]
    before = evaluate(model, held, classify)
    train(model, batch, classify, Plan(steps=150, learning_rate=1e-2, warmup_steps=20, quiet=True))
    assert before > 0.6
    assert evaluate(model, held, classify) < 0.1


def copies(step, rows=24, longest=6):
    """A source of letters with a 0 behind them, and the same letters to be written; 0 starts a target."""
    lengths = 3 + draw((rows,), longest - 2, step + 1)
    letters = 1 + draw((rows, longest), 21, step)
    nothing = torch.zeros(rows, 1, dtype=torch.long)
    source = torch.cat([letters, nothing], 1).scatter(1, lengths[:, None], 0)
    layout, source_layout = (
        TokenLayout.padded(lengths.tolist(), longest),
        TokenLayout.padded((lengths + 1).tolist(), longest + 1),
    )
    return Batch(torch.cat([nothing, letters[:, :-1]], 1), letters, layout, source, source_layout)


def test_seq2seq_reads_its_source_and_not_its_padding(lively):
    model, batch = lively(build(from_yaml(SEQ2SEQ))), copies(0)
    assert batch.source is not None
    assert batch.source_layout is not None
    plain = seq2seq(model, batch, 0, False).mean().item()
    padding = dc.replace(batch, source=batch.source.masked_fill(~batch.source_layout.real, 1))
    other = dc.replace(batch, source=batch.source.flip(0))
    assert seq2seq(model, padding, 0, False).mean().item() == pytest.approx(plain, abs=1e-6)
    assert seq2seq(model, other, 0, False).mean().item() != pytest.approx(plain, abs=1e-3)
    assert batch.count == 2 * int(batch.layout.real.sum()) + 24


@pytest.mark.slow
def test_seq2seq_learns_to_copy():
    model = build(from_yaml(SEQ2SEQ))
    held = [copies(100_000 + i) for i in range(4)]
    before = evaluate(model, held, seq2seq)
    train(model, copies, seq2seq, Plan(steps=900, learning_rate=6e-3, warmup_steps=50, quiet=True))
    assert before > 2.8
    assert evaluate(model, held, seq2seq) < 0.3
