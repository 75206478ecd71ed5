"""What verify shows of a verdict on two sides, on a server or on rollouts, and a line of each result when it is known."""

from __future__ import annotations

from dovetail.proof.compare.check import Verdict
from dovetail.proof.compare.server import ServerVerdict
from dovetail.proof.rollouts.verdict import RolloutVerdict
from dovetail.views import rollouts, server_verdict, verdict as taps
from dovetail.views.blocks import View
from dovetail.views.server_verdict import row_line as row_line
from dovetail.views.verdict import pass_line as pass_line


def verdict_view(verdict: Verdict | ServerVerdict | RolloutVerdict, every: bool) -> View:
    """Return the verdict on a terminal; with `every` a line per tap in every layer."""
    if isinstance(verdict, RolloutVerdict):
        return rollouts.view(verdict)
    return server_verdict.view(verdict) if isinstance(verdict, ServerVerdict) else taps.view(verdict, every=every)


def verdict_page(verdict: Verdict | ServerVerdict | RolloutVerdict) -> str:
    """Return the content of its page."""
    if isinstance(verdict, RolloutVerdict):
        return rollouts.rollouts_body(verdict)
    return server_verdict.server_body(verdict) if isinstance(verdict, ServerVerdict) else taps.verdict_body(verdict)
