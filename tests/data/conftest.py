"""Small corpora of token shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dovetail.data.manifest import DataSplit, Manifest, TokenizerInfo
from dovetail.data.shards import ShardInfo, ShardWriter, dtype_for

Write = Callable[..., Path]


def write_corpus(directory: Path, shards: Sequence[Sequence[Sequence[int]]], vocab: int = 600) -> Path:
    """A directory of shards, each a list of documents of ids; all of them are for training."""
    directory.mkdir(parents=True, exist_ok=True)
    infos: list[ShardInfo] = []
    for number, documents in enumerate(shards):
        with ShardWriter(directory, f"train-{number:05d}", dtype_for(vocab)) as shard:
            for ids in documents:
                shard.add(np.array(ids, np.int64), 3 * len(ids))
        assert shard.info is not None
        infos.append(shard.info)
    info = TokenizerInfo("0" * 64, vocab, None)
    Manifest(info, {"train": DataSplit(tuple(infos)), "held_out": DataSplit()}, {"duplicates": 0, "empty": 0}, {}).write(
        directory
    )
    return directory


@pytest.fixture
def corpus(tmp_path: Path) -> Write:
    return lambda *shards, vocab=600, name="corpus": write_corpus(tmp_path / name, shards, vocab)
