"""Files of tagged words: JSON Lines of {"tokens": ["Ada", "slept"], "tags": ["B-PER", "O"]}, one tag per word.

They are untrusted, and read into memory. A tag is any string; entities are runs of BIO tags (training/entities.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from dovetail.core.errors import FileError
from dovetail.core.limits import PROMPT_CHARACTERS, ROW_CLASSES, TEXT_BYTES
from dovetail.data.rows import objects_of, sha256_of, text_of
from dovetail.disk.untrusted import read_regular


class TaggedWords(NamedTuple):
    """The words of each row, and the tag of each word."""

    words: list[list[str]]
    tags: list[list[str]]
    sha256: str

    def names(self) -> list[str]:
        """The tags, sorted."""
        return sorted({tag for row in self.tags for tag in row})


def read_tagged_words(path: Path) -> TaggedWords:
    """Read JSON Lines of words and their tags."""
    content = read_regular(path, TEXT_BYTES, "a file of rows")
    words, tags = list[list[str]](), list[list[str]]()
    for number, row in objects_of(path, content):
        words.append(_strings(path, number, row, "tokens"))
        tags.append(_strings(path, number, row, "tags"))
        if len(words[-1]) != len(tags[-1]):
            raise FileError(f"{path}:{number}: has {len(words[-1])} tokens and {len(tags[-1])} tags; give one tag per token")
        if (characters := sum(map(len, words[-1]))) > PROMPT_CHARACTERS:
            raise FileError(f"{path}:{number}: has {characters:,} characters; the limit is {PROMPT_CHARACTERS:,}; cut the row")
    data = TaggedWords(words, tags, sha256_of(content))
    if (count := len(data.names())) > ROW_CLASSES:
        raise FileError(f"{path}: has {count:,} tags; the limit is {ROW_CLASSES:,}")
    return data


def _strings(path: Path, number: int, row: dict[str, Any], field: str) -> list[str]:
    """Return the strings of a field of a row; raise FileError for anything else, and for an empty one."""
    values = row.get(field)
    if not isinstance(values, list) or not values:
        what = "missing" if values is None else "empty" if values == [] else type(values).__name__
        raise FileError(f'{path}:{number}: its "{field}" is {what}; give a list of strings: "{field}": ["…", "…"]')
    named = {f"{field}[{i}]": value.strip() if isinstance(value, str) else value for i, value in enumerate(values)}
    for name in named:
        text_of(path, number, named, name)
    return values
