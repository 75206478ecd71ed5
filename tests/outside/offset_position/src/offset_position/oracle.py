"""Numbers by hand for `offset`: two heads with slopes 0.5 and 2, a query at 3 and one at 4 over keys 0 … 4."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.proof.laws.oracle import Comparison, alone, oracle, part, row


@oracle("offset")
def offset() -> Iterator[Comparison]:
    """Slope times distance, taken off; both directions count."""
    module = alone(part("offset"), {"slope": [0.5, 2.0]}, heads=2)
    mild = [[-1.5, -1.0, -0.5, 0.0, -0.5], [-2.0, -1.5, -1.0, -0.5, 0.0]]
    steep = [[-6.0, -4.0, -2.0, 0.0, -2.0], [-8.0, -6.0, -4.0, -2.0, 0.0]]
    yield Comparison("two queries, five keys", module.score(row(2, start=3), row(5), *module.tables()), [[mild, steep]])
    yield Comparison("a slope a head, the same at first", module.part.constant("slope", module.scope), [0.1, 0.1])
