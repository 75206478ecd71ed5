"""Streams, packing and loaders: each sample once per epoch, and the same batches whatever the ranks, workers and resumes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.base.errors import FileError, InputError, UsageError
from dovetail.data.bits import bits_per_byte
from dovetail.data.corpora import CorpusTokens, open_tokens
from dovetail.data.corpus import Batch
from dovetail.data.loader import LengthWarmup, Loader, evaluation, to_batch
from dovetail.data.stream import SampleWindow, Stream
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED

Write = Callable[..., Path]


@pytest.fixture
def tokens(corpus: Write) -> CorpusTokens:
    """1,001 tokens 0, 1, 2, … in documents of uneven lengths, over three shards."""
    lengths, at = [7, 1, 30, 12, 3, 19], 0
    documents: list[list[int]] = []
    for length in itertools.cycle(lengths):
        documents.append(list(range(at, min(at + length, 1001))))
        at += length
        if at >= 1001:
            break
    third = len(documents) // 3
    return open_tokens(corpus(documents[:third], documents[third : 2 * third], documents[2 * third :], vocab=1001))


@pytest.fixture
def other(corpus: Write) -> CorpusTokens:
    return open_tokens(corpus([list(range(500, 600))], name="other"))


# -- the stream


def test_every_window_comes_once_per_epoch_in_another_order(tokens: CorpusTokens) -> None:
    stream = Stream(tokens, 8, seed=5)
    assert stream.sizes == [125]
    starts = [[int(window.ids[0]) for window in stream.samples(125 * epoch, 125)] for epoch in range(3)]
    for some in starts:
        assert sorted(some) == list(range(0, 1000, 8))
    assert starts[0] != starts[1] != starts[2]
    assert starts[0] != sorted(starts[0])
    assert [int(window.ids[0]) for window in Stream(tokens, 8, seed=6).samples(0, 125)] != starts[0]
    assert stream.sample(130).ids.tolist() == list(range(starts[1][5], starts[1][5] + 9))
    assert stream.epochs(250) == [2.0]


def test_a_mixture_repeats_a_small_corpus_and_keeps_the_weights(tokens: CorpusTokens, other: CorpusTokens) -> None:
    stream = Stream([(tokens, 3), (other, 1)], 8)
    source, start = stream.places(0, 400)
    assert abs((source == 1).sum() - 100) <= 2
    assert sorted(start[source == 1][:12].tolist()) == list(range(0, 96, 8))  # one epoch of the second
    assert sorted(start[source == 1][12:24].tolist()) == list(range(0, 96, 8))
    assert stream.epochs(400)[1] == (source == 1).sum() / 12
    pieces = [stream.places(first, 7) for first in range(0, 399, 7)]
    assert np.array_equal(np.concatenate([p[1] for p in pieces]), start[:399])


def test_a_fingerprint_is_of_all_that_determines_a_sample(tokens: CorpusTokens, other: CorpusTokens) -> None:
    streams = [
        *(Stream(tokens, 8), Stream(tokens, 9), Stream(tokens, 8, seed=1), Stream(other, 8)),
        *(Stream([(tokens, 1), (other, 1)], 8), Stream([(tokens, 2), (other, 1)], 8)),
    ]
    assert len({stream.fingerprint for stream in streams}) == len(streams)
    assert Stream(tokens, 8).fingerprint == streams[0].fingerprint


def test_a_corpus_that_is_too_short_is_named(tokens: CorpusTokens) -> None:
    assert Stream(tokens, 1000).sizes == [1]
    with pytest.raises(FileError, match=r"1,001 tokens are too few for samples of 1,001"):
        Stream(tokens, 1001)
    with pytest.raises(UsageError, match="length: 0"):
        Stream(tokens, 0)


# -- packing


def test_packed_documents_by_hand() -> None:
    window = SampleWindow(np.arange(10, 18), np.array([3, 5]))
    batch = to_batch([window, SampleWindow(np.arange(20, 28), np.array([7]))])
    assert batch.tokens.tolist() == [list(range(10, 17)), list(range(20, 27))]
    x = IGNORED
    assert batch.labels.tolist() == [[11, 12, x, 14, x, 16, 17], [21, 22, 23, 24, 25, 26, x]]
    assert batch.layout.seg.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0] * 7]
    assert batch.layout.order.tolist() == [[0, 1, 2, 0, 1, 0, 1], list(range(7))]
    expected = TokenLayout.packed([[3, 2, 2], [7]], 7)
    assert torch.equal(batch.layout.order, expected.order)
    assert torch.equal(batch.layout.seg, expected.seg)
    assert batch.layout.documents == expected.documents == (3, 1)
    assert batch.count == 14


def test_without_masks_a_row_is_one_document() -> None:
    batch = to_batch([SampleWindow(np.arange(10, 18), np.array([3, 5]))], masks=False)
    assert batch.labels.tolist() == [list(range(11, 18))]
    assert batch.layout.start == 0


def test_shorter_rows_hold_the_same_tokens_and_labels() -> None:
    window = SampleWindow(np.arange(10, 19), np.array([3, 4]))
    batch = to_batch([window, window], length=4, first_row=5)
    x = IGNORED
    assert batch.tokens.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]] * 2
    assert batch.labels.tolist() == [[11, 12, x, x], [15, 16, 17, 18]] * 2
    assert batch.layout.order.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]] * 2
    assert batch.layout.sample[:, 0].tolist() == [10, 11, 12, 13]
    with pytest.raises(UsageError, match="3 does not divide the 8 tokens"):
        to_batch([window], length=3)


def test_the_warm_up_doubles_the_length() -> None:
    warmup = LengthWarmup(first=4, tokens=300)
    assert warmup.lengths(32) == [4, 8, 16, 32]
    assert [warmup(seen, 32) for seen in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [4, 4, 8, 8, 16, 16, 32, 32]
    assert LengthWarmup(32, 5)(0, 32) == 32
    for wrong in (LengthWarmup(5, 300), LengthWarmup(4, 0), LengthWarmup(64, 300)):
        with pytest.raises(UsageError, match="warm-up"):
            wrong(0, 32)


# -- the loader


def together(loaders: list[Loader], steps: int) -> list[Batch]:
    """The global batches of all ranks."""
    found: list[Batch] = []
    for parts in itertools.islice(zip(*loaders, strict=True), steps):
        layouts = [(part.layout.seg, part.layout.order, part.layout.sample) for part in parts]
        seg, order, sample = (torch.cat(some) for some in zip(*layouts, strict=True))
        layout = TokenLayout(None, order, seg, sample=sample)
        found.append(Batch(torch.cat([p.tokens for p in parts]), torch.cat([p.labels for p in parts]), layout))
    return found


def loaders(stream: Stream, world: int, workers: int, batch: int = 12, state: dict[str, object] | None = None) -> list[Loader]:
    warmup = LengthWarmup(2, 1500)
    some = [Loader(stream, batch=batch, rank=r, world=world, workers=workers, warmup=warmup) for r in range(world)]
    for loader in some:
        if state is not None:
            loader.load_state(state)
    return some


def same(one: Batch, other: Batch) -> bool:
    pairs = [(batch.tokens, batch.labels, batch.layout.seg, batch.layout.order, batch.layout.sample) for batch in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("warm_up", [1, 100, 337, 750])
def test_all_ranks_cut_the_rows_of_a_batch_alike(tokens: CorpusTokens, warm_up: int) -> None:
    stream, warmup = Stream(tokens, 8), LengthWarmup(2, warm_up)
    for world in (1, 5, 12):
        some = [Loader(stream, batch=12, rank=rank, world=world, warmup=warmup) for rank in range(world)]
        for position in range(0, 120, 12):
            rows = {loader.batch_at(position).tokens.shape[1] for loader in some}
            assert rows == {warmup(8 * position, 8)}, (world, position)


def test_ranks_and_workers_change_at_every_resume_and_batches_do_not(tokens: CorpusTokens, other: CorpusTokens) -> None:
    stream = Stream([(tokens, 0.8), (other, 0.2)], 8, seed=2)
    whole = together(loaders(stream, 1, 0), 40)
    assert len({tuple(batch.tokens.shape) for batch in whole}) == 3  # the warm-up: rows of 2, 4 and 8 tokens
    state, resumed = None, list[Batch]()
    for world, workers, steps in ((4, 1, 3), (2, 3, 1), (3, 0, 9), (5, 2, 0), (1, 3, 20), (12, 0, 7)):
        some = loaders(stream, world, workers, state=state)
        resumed += together(some, steps)
        # a loader is one batch ahead of what zip has returned only where the next batch was asked for
        state = {"samples": 12 * len(resumed), "stream": stream.fingerprint}
    assert len(resumed) == 40
    assert all(same(one, two) for one, two in zip(whole, resumed, strict=True))


def test_the_state_counts_what_was_consumed_not_what_was_read_ahead(tokens: CorpusTokens) -> None:
    stream = Stream(tokens, 8)
    for workers in (0, 1, 4):
        loader = Loader(stream, batch=5, workers=workers)
        batches = iter(loader)
        first = [next(batches) for _ in range(3)]
        assert loader.state() == {"samples": 15, "stream": stream.fingerprint}
        again = Loader(stream, batch=5, workers=workers)
        again.load_state(loader.state())
        assert same(next(iter(again)), next(batches))
        assert not same(first[0], first[1])


def test_another_batch_continues_with_the_next_sample(tokens: CorpusTokens) -> None:
    stream = Stream(tokens, 8)
    whole = torch.cat([batch.tokens for batch in itertools.islice(Loader(stream, batch=1), 125)])
    parts, state = list[torch.Tensor](), Loader(stream, batch=1).state()
    for batch, steps in ((7, 3), (4, 10), (16, 4)):
        loader = Loader(stream, batch=batch)
        loader.load_state(state)
        parts += [one.tokens for one in itertools.islice(loader, steps)]
        state = loader.state()
    assert torch.equal(torch.cat(parts), whole)


def test_the_state_of_other_data_is_refused(tokens: CorpusTokens, other: CorpusTokens) -> None:
    state = Loader(Stream(tokens, 8), batch=2).state()
    for stream in (Stream(other, 8), Stream(tokens, 4), Stream(tokens, 8, seed=1)):
        loader = Loader(stream, batch=2)
        with pytest.raises(FileError, match=r"differ from those of the run that is resumed; .*force=True"):
            loader.load_state({**state, "samples": 6})
        loader.load_state({**state, "samples": 6}, force=True)
        assert loader.position == 6
    for wrong in ({}, {**state, "samples": -1}, {**state, "samples": True}, {**state, "more": 1}):
        with pytest.raises(FileError, match="the state of the data is"):
            loader.load_state(wrong)


def test_ranks_that_cannot_be_right(tokens: CorpusTokens) -> None:
    for rank, world in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(UsageError, match="every rank needs at least one sample"):
            Loader(Stream(tokens, 8), batch=2, rank=rank, world=world)
    with pytest.raises(UsageError, match="warm-up"):
        Loader(Stream(tokens, 8), batch=2, warmup=LengthWarmup(3, 100))


# -- evaluation


def test_every_held_out_window_comes_once(tokens: CorpusTokens) -> None:
    batches = list(evaluation(tokens, 8, 10))
    assert torch.equal(torch.cat([batch.tokens.flatten() for batch in batches]), torch.arange(1000))
    parts = [batch for rank in range(3) for batch in evaluation(tokens, 8, 10, rank=rank, world=3)]
    assert torch.equal(torch.cat([batch.tokens.flatten() for batch in parts]).sort().values, torch.arange(1000))
    few = [batch.tokens[:, 0].tolist() for batch in evaluation(tokens, 8, 3, most=2)]
    assert [len(some) for some in few] == [3, 3]
    assert [*few[0], *few[1]] == [0, 160, 328, 496, 664, 832]
    (long,) = evaluation(tokens, 5000, 3)
    assert long.tokens.shape == (1, 1000)


def test_bits_per_byte_by_hand() -> None:
    """A uniform distribution over 256 bytes has 8 bits per byte, whatever the tokens are."""
    assert bits_per_byte(math.log(256) * 50, 50, 1000, 1000) == pytest.approx(8)
    assert bits_per_byte(math.log(256**3) * 50, 50, 1000, 3000) == pytest.approx(8)  # three bytes per token
    with pytest.raises(InputError, match="there are 0, 3 and 4"):
        bits_per_byte(1.0, 0, 3, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a22_a_state_loaded_in_mid_iteration_takes_effect_at_the_next_batch(tokens: CorpusTokens, workers: int) -> None:
    """With workers the batches that had been read ahead were returned first, and then counted as others."""
    loader = Loader(Stream(tokens, 8, seed=5), batch=4, workers=workers)
    batches = iter(loader)
    first = [next(batches).tokens for _ in range(3)]
    loader.load_state({**loader.state(), "samples": 4})
    again = [next(batches).tokens for _ in range(2)]
    assert all(map(torch.equal, again, first[1:]))
    assert loader.position == 12
    other = iter(loader)  # two iterators share the position
    taken = [int(next(one).tokens[0, 0]) for one in (batches, other, batches, other)]
    assert taken == [int(loader.batch_at(12 + 4 * i).tokens[0, 0]) for i in range(4)]
