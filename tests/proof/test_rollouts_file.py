"""Files of rollouts: ours and NeMo-RL's are read; what is not finite or does not fit is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.base.errors import FileError
from dovetail.proof.rollouts import file as reader
from dovetail.proof.rollouts.file import read_rollouts
from dovetail.proof.rollouts.sampling import Settings

LINE: dict[str, Any] = {"prompt_ids": [3, 14], "completion_ids": [15, 9, 2], "logprobs": [-0.2, -1.7, -3]}


def written(place: Path, *lines: Any) -> Path:
    file = place / "r.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines) + "\n")
    return file


def test_a_line_of_ours(tmp_path: Path) -> None:
    more = {"mask": [1, 0, 1], "temperature": 0.7, "top_p": 1.0, "top_k": -1, "weights_version": 4, "_reward": 1.5}
    (one,) = read_rollouts(written(tmp_path, {**LINE, **more}))
    assert one.tokens == [3, 14, 15, 9, 2]
    assert one.sampled == [False, False, True, False, True]
    assert one.logprobs == [0.0, 0.0, -0.2, -1.7, -3.0]
    assert one.settings == Settings(temperature=0.7)
    assert (one.version, one.first, one.line) == (4, 2, 1)


@pytest.mark.parametrize("batched", [False, True])
def test_a_line_of_nemo_rl(tmp_path: Path, batched: bool) -> None:
    row = {
        "token_ids": [3, 14, 15, 9, 0, 0],
        "token_loss_mask": [0, 0, 1, 1, 0, 0],
        "generation_logprobs": [0.0, 0.0, -0.2, -1.7, 0.0, 0.0],
        "prev_logprobs": [0.0, 0.0, -0.3, -1.6, 0.0, 0.0],
        "input_lengths": 4,
        "sample_loss_mask": 1.0,
        "rewards": 0.5,
        "content": "text",
    }
    line = {name: [value] if batched else value for name, value in row.items()}
    (one,) = read_rollouts(written(tmp_path, {**line, "idx": 0}))
    assert one.tokens == [3, 14, 15, 9]
    assert one.sampled == [False, False, True, True]
    assert one.logprobs[2:] == [-0.2, -1.7]
    assert one.trainer is not None
    assert one.trainer[2:] == [-0.3, -1.6]


def test_a_row_of_nemo_rl_that_does_not_count_is_left_out(tmp_path: Path) -> None:
    row = {"token_ids": [3, 4], "token_loss_mask": [0, 1], "generation_logprobs": [0.0, -1.0]}
    read = read_rollouts(written(tmp_path, {**row, "sample_loss_mask": [0.0]}, {**row, "sample_loss_mask": [1.0]}))
    assert [one.line for one in read] == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-0.2, -1.7]}, "logprobs has 2 numbers for 3 tokens"),
        ({"logprobs": [-0.2, float("-inf"), -1]}, r"logprobs\[1\] is -inf, not a finite number"),
        ({"logprobs": [-0.2, float("nan"), -1]}, "NaN is not a number"),
        ({"logprobs": [-0.2, 0.7, -1]}, r"logprobs\[1\] is 0.7; a log-prob is at most 0"),
        ({"logprobs": "none"}, "logprobs is not a list"),
        ({"completion_ids": [15, -9, 2]}, r"completion_ids\[1\] is -9, not a token id"),
        ({"completion_ids": [15, True, 2]}, r"completion_ids\[1\] is True, not a token id"),
        ({"prompt_ids": []}, "give at least one prompt token"),
        ({"mask": [1, 2, 0]}, r"mask\[1\] is 2, not 0 or 1"),
        ({"temprature": 0.7}, "'temprature' is no key of a rollout; did you mean temperature"),
        ({"top_p": 1.7}, "top_p and min_p are from 0 to 1"),
        ({"temperature": float("inf")}, "temperature is inf, not a finite number"),
        ({"weights_version": [1]}, "not a number or a string"),
    ],
)
def test_what_is_wrong_is_refused_by_its_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message) as error:
        read_rollouts(written(tmp_path, LINE, {**LINE, **change}))
    assert "r.jsonl:2: " in str(error.value)


def test_a_missing_key_names_both_forms(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"r.jsonl:1: logprobs is missing; .* NeMo-RL's token_ids"):
        read_rollouts(written(tmp_path, {"prompt_ids": [1], "completion_ids": [2]}))


@pytest.mark.parametrize("text", ["", "\n\n", json.dumps({**LINE, "mask": [0, 0, 0]})])
def test_a_file_without_a_sampled_token_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileError, match="holds no sampled token"):
        read_rollouts(written(tmp_path, text))


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("ROLLOUT_BYTES", 10, "the limit is 10"),
        ("ROLLOUT_LINE_BYTES", 10, ":1: is longer than 10 bytes"),
        ("ROLLOUT_LINES", 1, "more than 1 lines"),
        ("ROLLOUT_TOKENS", 4, ":1: has 5 tokens; the limit is 4"),
        ("ROLLOUT_TOTAL", 7, ":2: the file holds more than 7 tokens"),
    ],
)
def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, message: str) -> None:
    file = written(tmp_path, LINE, LINE)
    assert len(read_rollouts(file)) == 2
    monkeypatch.setattr(reader, limit, most)
    with pytest.raises(FileError, match=message):
        read_rollouts(file)


def test_a_pipe_or_a_directory_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is not a regular file"):
        read_rollouts(tmp_path)
    with pytest.raises(FileError, match="cannot be read"):
        read_rollouts(tmp_path / "none.jsonl")
