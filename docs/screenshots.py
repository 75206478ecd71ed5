"""Screenshots of the built site in Chromium: four pages at three widths, light and dark.

    python -m sphinx -q -W --keep-going -b html docs docs/_build/html
    python docs/screenshots.py [--site docs/_build/html] [--out docs/_build/screenshots] [--pages index reference/results]

A page is shown in a frame of the given width, since Chromium's own window is at least 500 pixels wide. Needs `chromium` on the
path (Debian: `apt-get install chromium`); nothing is loaded from a network. Look at the pictures: no test judges them.
"""

from __future__ import annotations

import argparse
import html
import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("index", "reference/results", "train", "reference/parts")
WIDTHS = (400, 1400, 1920)
SCHEMES = ("light", "dark")
HEIGHT = 2400
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--allow-file-access-from-files",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
)


def screenshot(page: Path, width: int, scheme: str, target: Path) -> None:
    """Write a PNG of a page in a frame of this width."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        source = html.escape(page.resolve().as_uri())
        style = f"border:0;display:block;width:{width}px;height:{HEIGHT}px;color-scheme:{scheme}"
        frame.write_text(
            f'<!doctype html><body style="margin:0"><iframe src="{source}" style="{style}"></iframe>', encoding="utf-8"
        )
        options = [f"--user-data-dir={folder}/profile", f"--window-size={max(width, 500)},{HEIGHT}", f"--screenshot={target}"]
        subprocess.run(["chromium", *FLAGS, *options, frame.as_uri()], check=True, capture_output=True, timeout=300)


def main() -> None:
    """Take all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "docs/_build/html")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/_build/screenshots")
    parser.add_argument("--pages", nargs="*", default=PAGES)
    parser.add_argument("--widths", nargs="*", type=int, default=WIDTHS)
    flags = parser.parse_args()
    if shutil.which("chromium") is None:
        parser.error("chromium is not on the path")
    flags.out.mkdir(parents=True, exist_ok=True)
    for page, width, scheme in itertools.product(flags.pages, flags.widths, SCHEMES):
        target = flags.out / f"{page.replace('/', '-')}-{width}-{scheme}.png"
        screenshot(flags.site / f"{page}.html", width, scheme, target)
        sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main()
