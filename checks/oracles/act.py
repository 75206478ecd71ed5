"""Oracles of activations at −2, −½, 0, ½, 2, computed from their formulas by hand (Φ(2) = 0.97724987, σ(2) = 0.88079708 …)."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.proof.laws.oracle import Comparison, numbers, oracle, part

POINTS = [-2.0, -0.5, 0.0, 0.5, 2.0]
VALUES = {
    "relu": [0.0, 0.0, 0.0, 0.5, 2.0],
    "relu2": [0.0, 0.0, 0.0, 0.25, 4.0],
    "gelu": [-0.0455002639, -0.1542687694, 0.0, 0.3457312306, 1.9544997361],  # x·½(1 + erf(x/√2))
    "gelu_tanh": [-0.0454023059, -0.1542859902, 0.0, 0.3457140098, 1.9545976941],  # x·½(1 + tanh(√(2/π)(x + 0.044715x³)))
    "quick_gelu": [-0.0643413769, -0.1496115634, 0.0, 0.3503884366, 1.9356586231],  # x·σ(1.702x)
    "silu": [-0.2384058440, -0.1887703344, 0.0, 0.3112296656, 1.7615941560],  # x·σ(x)
    "sigmoid": [0.1192029220, 0.3775406688, 0.5, 0.6224593312, 0.8807970780],
    "tanh": [-0.9640275801, -0.4621171573, 0.0, 0.4621171573, 0.9640275801],
    "identity": [-2.0, -0.5, 0.0, 0.5, 2.0],
}


def _register(kind: str, values: list[float]) -> None:
    @oracle(kind)
    def at_five_points() -> Iterator[Comparison]:
        yield Comparison("at −2, −½, 0, ½, 2", part(kind).function(numbers(POINTS)), values, near=1e-9)


for _kind, _values in VALUES.items():
    _register(_kind, _values)
