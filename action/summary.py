"""Add the result of `dovetail laws SIDE --json` to a job summary: python summary.py SIDE CODE RESULT SUMMARY.

Prints the number of laws that do not hold. The log, on stderr, gets one line for each law. Ends with 4 where RESULT holds no
result. Only the standard library is used.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

MARKS = {"passed": "✅", "failed": "❌", "not applicable": "➖"}
MOST = 500  # characters of a detail


def cell(text: str) -> str:
    """Text for a cell of a Markdown table: one line, without markup."""
    plain = " ".join(text.split())[:MOST].replace("&", "&amp;").replace("<", "&lt;")
    return plain.translate({ord(sign): f"\\{sign}" for sign in "\\|`*_[]"})


def rows(result: dict[str, Any]) -> list[str]:
    """The table of the laws of one side."""
    lines = ["| | law | seconds | detail |", "|---|---|--:|---|"]
    for law in result["laws"]:
        mark = MARKS.get(law["state"], law["state"])
        lines.append(f"| {mark} | {cell(law['law'])} | {law.get('seconds', 0):.1f} | {cell(law['detail'])} |")
    return lines


def read(text: str) -> dict[str, Any] | None:
    """The last JSON object of the output; code of a model may have printed before it."""
    begins = [match.start() for match in re.finditer(r"^\{$", text, re.MULTILINE)]
    try:
        return json.loads(text[begins[-1] :])
    except (IndexError, ValueError):
        return None


def main(side: str, code: str, result: str, summary: str) -> int | None:
    """Write the section of one side; return the number of laws that do not hold, None where none was tested."""
    lines, failed = [f"### {cell(side)}", ""], None
    data = read(Path(result).read_text(encoding="utf-8"))
    if data is None:
        lines.append(f"Could not be tested: `dovetail laws` ended with exit code {int(code)}. The log has the reason.")
        print(f"{side}: could not be tested", file=sys.stderr)
    else:
        lines += rows(data)
        failed = sum(law["state"] == "failed" for law in data["laws"])
        for law in data["laws"]:
            detail = " ".join(law["detail"].split())
            print(f"{side}: {law['law']}: {law['state']}" + (f": {detail}" if detail else ""), file=sys.stderr)
    with Path(summary).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n\n")
    return failed


if __name__ == "__main__":
    count = main(*sys.argv[1:5])
    print(count or 0)
    sys.exit(4 if count is None else 0)
