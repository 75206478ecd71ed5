"""After a run of parity tests: the greatest gap of each family, relative to scale."""

from __future__ import annotations

from typing import Any

from hf_form import WORST


def pytest_configure(config: Any) -> None:
    """Importing their gpt_bigcode warns."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, gap in sorted(WORST.items()):
        terminalreporter.write_line(f"{what}: {gap:.1e}")
