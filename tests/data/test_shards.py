"""Token shards: any window is read as it was written, and nothing that was changed is read at all."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dovetail.base.errors import FileError
from dovetail.data import blocks
from dovetail.data.blocks import BLOCK, CheckedFile, OpenFiles, block_crcs
from dovetail.data.corpora import ShardedTokens, open_tokens, verify_shards
from dovetail.data.manifest import Manifest
from dovetail.disk.shape import data_sha256

Write = Callable[..., Path]

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]], [], [[10, 11]], [[12, 13, 14, 15]]
IDS = list(range(1, 16))
ENDS = [3, 4, 9, 11, 15]


@pytest.mark.parametrize("vocab", [600, 65_536, 65_537])
def test_every_window_is_read_as_it_was_written(corpus: Write, vocab: int) -> None:
    tokens = open_tokens(corpus(*DOCUMENTS, vocab=vocab))
    assert (tokens.tokens, tokens.documents) == (15, 5)
    assert tokens.read(0, 2).dtype.itemsize == (2 if vocab <= 65_536 else 4)
    for start in range(16):
        for stop in range(start + 1, 16):
            assert tokens.read(start, stop).tolist() == IDS[start:stop]
            assert tokens.ends(start, stop).tolist() == [end for end in ENDS if start < end <= stop]


def test_a_window_behind_the_end_is_an_error(corpus: Write) -> None:
    tokens = open_tokens(corpus(*DOCUMENTS))
    for window in ((0, 16), (-1, 3), (5, 4)):
        with pytest.raises(IndexError):
            tokens.read(*window)


def test_ends_are_found_among_many_documents(corpus: Write) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4, 50_000)
    directory = corpus([np.arange(n) for n in lengths])
    tokens, ends = open_tokens(directory), np.cumsum(lengths)
    edges = [int(ends[at + i]) for at in (12_500, 25_000, 37_500) for i in (-2, -1, 0, 1)]  # where the bisection cuts
    for start in [0, 1, *edges, *rng.integers(0, tokens.tokens - 70, 50).tolist(), tokens.tokens - 70]:
        assert np.array_equal(tokens.ends(start, start + 70), ends[(ends > start) & (ends <= start + 70)])
    assert np.array_equal(tokens.ends(0, tokens.tokens), ends)


def test_the_bytes_are_plain_little_endian_ids(corpus: Write) -> None:
    directory = corpus([[1, 258], [3]])
    assert (directory / "train-00000.bin").read_bytes() == bytes([1, 0, 2, 1, 3, 0])
    assert (directory / "train-00000.idx").read_bytes()[-16:] == bytes([2, *[0] * 7, 3, *[0] * 7])


# -- damage -----------------------------------------------------------------------------------------------------------------


def read_all(directory: Path) -> None:
    tokens = ShardedTokens(directory)
    tokens.read(0, tokens.tokens)
    tokens.ends(0, tokens.tokens)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx", "manifest.json"])
def test_one_flipped_bit_is_found_before_use(corpus: Write, name: str) -> None:
    rng = np.random.default_rng(1)
    directory = corpus([rng.integers(0, 600, 7) for _ in range(6000)])  # several blocks of ids
    path = directory / name
    data = path.read_bytes()
    for at in sorted({0, 5, 9, *range(40, 56), len(data) - 1, *rng.integers(0, len(data), 40).tolist()}):
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(changed)
        with pytest.raises(FileError, match=name.split(".")[0]):
            read_all(directory)
        if name != "manifest.json":
            assert [problem.split(":")[0] for problem in verify_shards(directory)] == [str(path)]
    path.write_bytes(data)
    read_all(directory)
    assert verify_shards(directory) == []


def test_a_damaged_block_is_read_on_request(corpus: Write) -> None:
    directory = corpus([[1, 2, 3]])
    path = directory / "train-00000.bin"
    path.write_bytes(b"\x09" + path.read_bytes()[1:])
    with pytest.raises(FileError, match=r"train-00000\.bin: the block at byte 0 does not match its checksum"):
        open_tokens(directory).read(0, 3)
    assert open_tokens(directory, check=False).read(0, 3).tolist() == [9, 2, 3]


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx"])
@pytest.mark.parametrize("size", [0, 7, 8, 31, -1, 1])
def test_another_size_is_refused(corpus: Write, name: str, size: int) -> None:
    directory = corpus([[1, 2, 3], [4, 5]] * 20)
    path = directory / name
    data = path.read_bytes()
    path.write_bytes(data + b"\0" if size == 1 else data[:size])
    with pytest.raises(FileError, match=rf"{name}: has [\d,]+ bytes, but [\d,]+ by the manifest"):
        read_all(directory)
    path.unlink()
    with pytest.raises(FileError, match=f"{name}: cannot be read"):
        read_all(directory)


MUTATIONS = {
    "schema version": {"dovetail_data": 2},
    "not the name of a shard": {"splits.train.shards.0.name": "../train-00000"},
    "not the name of a shard of train": {"splits.train.shards.0.name": "held_out-00000"},
    "whole number": {"splits.train.shards.0.tokens": -1},
    "whole number up to": {"tokenizer.vocab": True},
    "is not a SHA-256": {"splits.train.shards.0.sha256": "abc"},
    "its shards have": {"splits.train.tokens": 16},
    "must have the keys": {"more": 1},
    "is not a list": {"splits.train.shards": {}},
    "a vocabulary of": {"dtype": "uint32"},
    "its own checksum": {"settings": {"field": "body"}},
}


@pytest.mark.parametrize("says", MUTATIONS)
def test_a_manifest_is_untrusted(corpus: Write, says: str) -> None:
    directory = corpus(*DOCUMENTS)
    data = json.loads((directory / "manifest.json").read_text())
    for where, value in MUTATIONS[says].items():
        *path, last = where.split(".")
        at = data
        for step in path:
            at = at[int(step)] if isinstance(at, list) else at[step]
        at[last] = value
    if says != "its own checksum":
        del data["sha256"]
        data["sha256"] = data_sha256(data)
    (directory / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(FileError, match=rf"manifest\.json: .*{says}"):
        Manifest.load(directory)


def test_a_directory_without_a_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"is not a corpus of token shards"):
        open_tokens(tmp_path)
    (tmp_path / "build.json").write_text("{}")
    with pytest.raises(FileError, match=r"is an unfinished corpus; run the same `dovetail data build` again"):
        open_tokens(tmp_path)
    with pytest.raises(FileError, match=r"neither a directory of token shards nor a Megatron corpus"):
        open_tokens(tmp_path / "nowhere")


# -- failing reads ----------------------------------------------------------------------------------------------------------


def test_a_failed_read_is_tried_again(corpus: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "RETRIES", (0.0, 0.0))
    failures = [2]

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return os.pread(descriptor, min(size, 3), offset)  # short reads, too

    tokens = ShardedTokens(corpus(*DOCUMENTS), read=pread)
    assert tokens.read(0, 15).tolist() == IDS
    failures[0] = 3
    with pytest.raises(FileError, match=r"train-00002\.bin: bytes .* cannot be read after 3 attempts \(Input/output error\)"):
        tokens.read(9, 11)
    assert tokens.read(9, 11).tolist() == [10, 11]


def test_a_descriptor_that_fails_is_not_read_again(corpus: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle of a network file system fails for good: only a file that is opened anew can be read."""
    monkeypatch.setattr(blocks, "RETRIES", (0.0, 0.0))
    opened, stale = list[Path](), [0]

    class Counted(blocks.Descriptor):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.append(path)

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if len(opened) == stale[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return os.pread(descriptor, size, offset)

    monkeypatch.setattr(blocks, "Descriptor", Counted)
    tokens = ShardedTokens(corpus(*DOCUMENTS), read=pread)
    for _ in range(3):
        assert tokens.read(0, 15).tolist() == IDS
        stale[0] = len(opened)


def test_more_shards_than_open_files(corpus: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ShardedTokens(corpus(*([[i]] for i in range(30))))
    tokens.files.most = 4
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert tokens.read(0, 30).tolist() == list(range(30))
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_damage_of_any_block_at_any_moment_of_random_reads_is_found(tmp_path: Path) -> None:
    """A seeded bug compared no further block once one had been; blocks that had been read once were not compared again."""
    rng, data = random.Random(0), bytes(random.Random(1).randbytes(5 * BLOCK + 100))
    path, crcs = tmp_path / "x", np.array(block_crcs(data), np.uint32)
    for _ in range(30):
        path.write_bytes(data)
        file = CheckedFile(OpenFiles(), path, len(data), crcs)
        damaged = -1
        for moment in range(rng.randint(0, 6) + 8):
            if damaged < 0 and (moment == 6 or rng.random() < 0.2):
                damaged = rng.randrange(len(data))
                with path.open("r+b") as out:
                    out.seek(damaged)
                    out.write(bytes([data[damaged] ^ 1 << rng.randrange(8)]))
            start = rng.randrange(len(data)) if moment < 7 else damaged // BLOCK * BLOCK
            stop = min(start + rng.choice([1, 900, BLOCK, 2 * BLOCK]), len(data))
            if damaged >= 0 and start // BLOCK <= damaged // BLOCK <= (stop - 1) // BLOCK:
                with pytest.raises(FileError, match="does not match its checksum"):
                    file.read(start, stop)
                break
            assert bytes(file.read(start, stop)) == data[start:stop]
        else:
            raise AssertionError("the damaged block was never read")
