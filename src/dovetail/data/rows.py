"""Files of rows: labeled texts, labeled images, tagged words, and pairs of texts. All of them are untrusted, and read into
memory.

    labels.jsonl    {"text": "…", "label": "sports"}         one object per line; a label is a string or a whole number
    labels.npz      images (N, H, W) or (N, C, H, W), labels (N,) whole numbers; arrays of numpy.savez, never pickled objects
    tags.jsonl      {"tokens": ["Ada", "slept"], "tags": ["B-PER", "O"]}    one tag per word, any string
    pairs.jsonl     {"a": "…", "b": "…"} or {"source": "…", "target": "…"}
    pairs.tsv       source, tab, target

Labels that are all whole numbers are the classes themselves; else the classes are the sorted labels. Pixels of unsigned
integers are scaled to −1 … 1, as ViT's are; floats stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import FileError
from dovetail.base.limits import ARRAY_BYTES, PROMPT_CHARACTERS, ROW_CLASSES, TEXT_BYTES
from dovetail.disk.untrusted import open_named, read_regular


class LabeledTexts(NamedTuple):
    """Texts, the class of each, and the names of the classes."""

    texts: list[str]
    labels: NDArray[np.int64]  # (N,)
    classes: list[str]
    sha256: str


class LabeledImages(NamedTuple):
    """Images (N, C, H, W) in float32, and the class of each (N,)."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    sha256: str


class TaggedWords(NamedTuple):
    """The words of each row, and the tag of each word."""

    words: list[list[str]]
    tags: list[list[str]]
    sha256: str

    def names(self) -> list[str]:
        """The tags, sorted."""
        return sorted({tag for row in self.tags for tag in row})


class TextPairs(NamedTuple):
    """The first and the second text of each pair."""

    first: list[str]
    second: list[str]
    sha256: str


def read_labeled_texts(path: Path) -> LabeledTexts:
    """Read JSON Lines of texts and labels."""
    content = read_regular(path, TEXT_BYTES, "a file of rows")
    texts, labels = list[str](), list[str | int]()
    for where, row in objects_of(path, content):
        texts.append(text_of(where, row, "text"))
        label = row.get("label")
        if not isinstance(label, (str, int)) or isinstance(label, bool):
            raise FileError(f'{where}: its "label" is {type(label).__name__}, not a string or a whole number')
        labels.append(label)
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels):
        classes = _check_classes(path, np.array(numbers, np.int64))
        return LabeledTexts(texts, classes, [str(i) for i in range(int(classes.max()) + 1)], sha256_of(content))
    names = sorted({str(label) for label in labels})
    if len(names) > ROW_CLASSES:
        raise FileError(f"{path}: has {len(names):,} labels; the limit is {ROW_CLASSES:,}")
    index = {name: i for i, name in enumerate(names)}
    return LabeledTexts(texts, np.array([index[str(label)] for label in labels], np.int64), names, sha256_of(content))


def read_tagged_words(path: Path) -> TaggedWords:
    """Read JSON Lines of words and their tags."""
    content = read_regular(path, TEXT_BYTES, "a file of rows")
    words, tags = list[list[str]](), list[list[str]]()
    for where, row in objects_of(path, content):
        words.append(_strings(where, row, "tokens"))
        tags.append(_strings(where, row, "tags"))
        if len(words[-1]) != len(tags[-1]):
            raise FileError(f"{where}: has {len(words[-1])} tokens and {len(tags[-1])} tags; give one tag per token")
        if (characters := sum(map(len, words[-1]))) > PROMPT_CHARACTERS:
            raise FileError(f"{where}: has {characters:,} characters; the limit is {PROMPT_CHARACTERS:,}; cut the row")
    data = TaggedWords(words, tags, sha256_of(content))
    if (count := len(data.names())) > ROW_CLASSES:
        raise FileError(f"{path}: has {count:,} tags; the limit is {ROW_CLASSES:,}")
    return data


def read_pairs(path: Path) -> TextPairs:
    """Read pairs of texts: JSON Lines, or a .tsv of two columns."""
    content = read_regular(path, TEXT_BYTES, "a file of rows")
    rows = list(_columns(path, content) if path.suffix.lower() == ".tsv" else _named_pairs(path, content))
    return TextPairs([a for a, _ in rows], [b for _, b in rows], sha256_of(content))


def _named_pairs(path: Path, content: str) -> Iterator[tuple[str, str]]:
    for where, row in objects_of(path, content):
        first, second = ("source", "target") if "source" in row or "target" in row else ("a", "b")
        yield text_of(where, row, first), text_of(where, row, second)


def _columns(path: Path, content: str) -> Iterator[tuple[str, str]]:
    lines = [(number, line) for number, line in enumerate(content.replace("\r\n", "\n").split("\n"), 1) if line.strip()]
    if not lines:
        raise FileError(f"{path}: is empty")
    for number, line in lines:
        columns = line.split("\t")
        if len(columns) != 2 or not all(columns):
            raise FileError(f"{path}:{number}: has {len(columns)} columns; give a source, a tab and a target, neither empty")
        yield columns[0], columns[1]


def read_labeled_images(path: Path) -> LabeledImages:
    """Read images and labels of an .npz file."""
    with open_named(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > ARRAY_BYTES:
            raise FileError(f"{path}: has {size:,} bytes; the limit is {ARRAY_BYTES:,}")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        images, labels = (_array(path, file, name) for name in ("images", "labels"))
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4 or images.dtype.kind not in "fiu" or not images.size:
        shape = f"{images.dtype} of the shape {images.shape}"
        raise FileError(f"{path}: its images are {shape}; give numbers (N, H, W) or (N, C, H, W)")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        shape = f"{labels.dtype} of the shape {labels.shape}"
        raise FileError(f"{path}: its labels are {shape}; give one whole number per image, ({len(images)},)")
    pixels = images.astype(np.float32)
    if images.dtype.kind == "u":
        pixels = pixels / np.float32(np.iinfo(images.dtype).max) * 2 - 1
    if not np.isfinite(pixels).all():
        raise FileError(f"{path}: an image holds a value that is not finite; remove it")
    return LabeledImages(pixels, _check_classes(path, labels.astype(np.int64)), digest)


def held_out_rows(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows to train on and those held out, each in order: a random choice that depends on their number alone, since a file
    is often sorted by class."""
    held_out = max(1, int(count * fraction))
    order = np.random.Generator(np.random.PCG64(0)).permutation(count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def objects_of(path: Path, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each line that is not blank (`rows.jsonl:3`), and its JSON object."""
    found = False
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileError(f"{where}: is not JSON ({str(error)[:120]})") from error
        if not isinstance(row, dict):
            raise FileError(f"{where}: is not a JSON object")
        found = True
        yield where, row
    if not found:
        raise FileError(f"{path}: is empty")


def text_of(where: str, row: dict[str, Any], field: str) -> str:
    """Return the text of a field of a row; raise FileError where it is none, or empty."""
    value = row.get(field)
    if not isinstance(value, str) or not value:
        fields = ", ".join(map(repr, list(row)[:12]))[:300]
        raise FileError(f'{where}: its "{field}" is {kind_of(value)}, not a text; its fields are {fields}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FileError(f'{where}: its "{field}" holds a lone surrogate, which is no character') from error
    return value


def kind_of(value: Any) -> str:
    """Return in a word what a field holds that should hold something else."""
    return "missing" if value is None else "empty" if value in ("", []) else type(value).__name__


def _strings(where: str, row: dict[str, Any], field: str) -> list[str]:
    """Return the strings of a field of a row; raise FileError for anything else, and for an empty one."""
    values = row.get(field)
    if not isinstance(values, list) or not values:
        raise FileError(f'{where}: its "{field}" is {kind_of(values)}; give a list of strings: "{field}": ["…", "…"]')
    named = {f"{field}[{i}]": value.strip() if isinstance(value, str) else value for i, value in enumerate(values)}
    for name in named:
        text_of(where, named, name)
    return values


def _check_classes(path: Path, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= ROW_CLASSES:
        raise FileError(f"{path}: a label is {low if low < 0 else high}; classes are 0 to {ROW_CLASSES - 1:,}")
    return labels


def _array(path: Path, file: BinaryIO, name: str) -> NDArray[Any]:
    """One array of an .npz file, whose header may lie: no more is allocated than the file says it holds."""
    try:
        with zipfile.ZipFile(file) as archive:
            info = archive.getinfo(f"{name}.npy")
            if info.file_size > ARRAY_BYTES:
                raise FileError(f"{path}: {name} has {info.file_size:,} bytes; the limit is {ARRAY_BYTES:,}")
            with archive.open(info) as member:
                shape, _, dtype = _header(member)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize > info.file_size:
                raise FileError(f"{path}: {name} is {dtype} of the shape {shape}, which the file cannot hold")
            with archive.open(info) as member:
                return np.lib.format.read_array(member, allow_pickle=False)
    except KeyError as error:
        raise FileError(f"{path}: has no array {name!r}; write it with numpy.savez(path, images=…, labels=…)") from error
    except (ValueError, OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise FileError(f"{path}: cannot be read as .npz ({str(error)[:200]})") from error


def _header(member: Any) -> tuple[Sequence[int], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member)


def sha256_of(content: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(content.encode()).hexdigest()
