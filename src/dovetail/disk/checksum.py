"""SHA-256 of files, and of plain data.

{"a": 1, …}  ->  canonical JSON (sorted keys, no spaces, no NaN)  ->  SHA-256
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.disk.untrusted import open_regular


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with os.fdopen(open_regular(path, path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_sha256(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
