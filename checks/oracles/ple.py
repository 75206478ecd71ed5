"""Oracle of per-layer embeddings, by hand: all matrices are 1, the embedding of the token is (1, 7), and x is (2, 3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from checks.oracles.wire import another_block, mlp, through
from dovetail.nn.cross_layer import Values
from dovetail.nn.ctx import Ctx
from dovetail.proof.laws.oracle import Comparison, alone, eye, numbers, oracle, part, row

TABLE = [[9.0, 9.0], [3.0, 1.0]]
WEIGHTS = {
    "table": TABLE,
    "project.weight": eye(2),
    "gate.weight": eye(2),
    "o.weight": eye(2),
    "found_norm.scale": [1.0, 2.0],
    "out_norm.scale": [1.0, 3.0],
}


@oracle("ple")
def ple() -> Iterator[Comparison]:
    """(1, 7)/√2 has the norm (0.2, 1.4), by (1, 2); row 1 is (3, 1)·√2. Their sum over √2 is (3.14142136, 2.97989899); times
    (2, 3) it is (6.28284271, 8.93969696), of root mean square 7.72632818; its norm by (1, 3)."""
    made = part("ple", piece=2, act=part("identity"), norm=part("rmsnorm", eps=1e-30))
    values = Values()
    values.given.update(inputs=torch.tensor([[1]]), embedded=numbers([[[1.0, 7.0]]]))
    out = alone(made, WEIGHTS, embed=2, vocab=2)(numbers([[[2.0, 3.0]]]), Ctx(layout=row(1)), values=values)
    yield Comparison("row 1", out[0, 0], [0.81317316, 3.47113017])


@oracle("ple_block")
def ple_block() -> Iterator[Comparison]:
    """With an ffn in its place, the third step reads (5.73805814, 14.94822645), what `pre_norm` gives, without a norm."""
    weights = {"ple.up.weight": eye(2), "ple.down.weight": eye(2, 1.5)}
    own = type("Own", (type(mlp()),), {"norms_itself": True})
    fields = {"wire": part("pre_norm"), "ple": own(**vars(mlp()))}
    block = another_block("ple_block", fields, ("mixer_norm", "ffn_norm"), weights)
    yield Comparison("behind the ffn, without a norm", through(block), [14.34514535, 37.37056613])
