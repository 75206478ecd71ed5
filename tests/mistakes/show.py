"""Print each mistake with its messages before and today: `python tests/mistakes/show.py`; `--record today` stores what the
package of PYTHONPATH says."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

import yaml
from common_mistakes import STORED, message_of, stored, write_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="COLUMN", choices=("before", "today"))
    column = parser.parse_args().record
    rows = stored()
    if column is None:
        print("\n\n".join(f"{row['mistake']}\n  before  {row['before']}\n  today   {row['today']}" for row in rows))
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_files(Path(folder))
        for row in rows:
            row[column] = message_of(row["mistake"]).replace(os.getcwd(), "CWD")
    STORED.write_text(yaml.safe_dump(rows, width=1000, sort_keys=False, allow_unicode=True), encoding="utf-8")


if __name__ == "__main__":
    main()
