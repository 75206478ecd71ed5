"""Every part in every layout: it trains as on one rank, or the spec is refused with the path of the part that cannot.

Specs with each kind are sampled, and run over two ranks as law 8 does (tensor, FSDP, sequence, ring, pipeline, and with
adapters), in float64. A cell is `equal` where some spec with the part ran, and none differed; a reason where a refusal names
the part; and else `other part`, where every sampled spec with it was refused for another part beside it. One differing run
fails the table.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator

from measure import Goal, Row, arguments, progress, versions

from dovetail.files.spec import to_yaml
from dovetail.model.model import Model
from dovetail.parallel.pair import Pair
from dovetail.proof.laws.case import RELATION
from dovetail.proof.laws.cover import all_factors, pins
from dovetail.proof.laws.sample import BLOCK, attempt
from dovetail.proof.laws.sharded import WAYS, Compared, compare_sharded
from dovetail.spec.part import KINDS, walk_spec
from dovetail.weights.adapters.kind import AdapterKind

OTHER = "other part"
EQUAL = "equal"
DIFFERS = "differs by"
TRIES = 24  # specs that are run for one kind of which a cell is not decided
DRAWN = 60 * TRIES  # specs that are drawn for it: of a kind without a place of its own, few have it (KV sharing: 1 in 100)
# pins for a kind of which no place is sampled: a block, or what attention takes from an earlier layer
NO_PLACE: list[dict[str, str]] = [{}, {f"{BLOCK}/mixer": "attention"}]


def kinds_of(spec: Model) -> dict[str, str]:
    """Path -> kind of every part of a spec."""
    return {path: part.kind for path, part in walk_spec(spec)}


def blamed(found: Compared, kinds: dict[str, str]) -> str | None:
    """The kind of the part that a refusal names, by the longest path that its own begins with."""
    path = found.reason.partition(":")[0]
    inside = [known for known in kinds if known and (path == known or path.startswith(f"{known}."))]
    return kinds[max(inside, key=len)] if inside else None


def wanted(table: dict[str, dict[str, str]], rng: random.Random) -> Iterator[Model]:
    """Sampled specs, each with a kind of which a cell is not decided yet; a kind's place is pinned, of several in turns."""
    places: dict[str, list[dict[str, str]]] = {}
    for factor in all_factors():
        if factor.kind:
            places.setdefault(factor.value, []).append(pins(factor))
    for kind in table:
        own, run = places.get(kind, NO_PLACE), 0
        for turn in range(DRAWN):
            if run == TRIES or all(cell not in ("", OTHER) for cell in table[kind].values()):
                break
            spec = attempt(rng, own[turn % len(own)])
            if spec is not None and kind in kinds_of(spec).values():
                run += 1
                yield spec


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--most", type=int, default=400, help="specs to run")
    options = parser.parse_args()
    most, rng = (3 if options.quick else options.most), random.Random(0)
    table: dict[str, dict[str, str]] = {
        kind: dict.fromkeys(map(str, WAYS), "") for kind in sorted(KINDS) if not issubclass(KINDS[kind], AdapterKind)
    }
    worst, runs = 0.0, 0
    with Pair(timeout=600) as pair, progress("specs", most) as tick:
        for _, spec in zip(range(most), wanted(table, rng), strict=False):
            kinds = kinds_of(spec)
            for how, found in compare_sharded(pair, to_yaml(spec), 0).items():
                guilty = blamed(found, kinds) if found.reason else None
                runs += not found.reason
                worst = max(worst, found.worst[1])
                if found.worst[1] > RELATION:
                    print(f"{how}: {found.worst[0]} differs by {found.worst[1]:.2g} in\n{to_yaml(spec)}", file=sys.stderr)
                for kind in set(kinds.values()):
                    before = table[kind][how]
                    if before.startswith(DIFFERS):
                        continue
                    if not found.reason:
                        table[kind][how] = EQUAL if found.worst[1] <= RELATION else f"{DIFFERS} {found.worst[1]:.1g}"
                    elif kind == guilty and before in ("", OTHER):
                        table[kind][how] = found.reason.partition(": ")[2]
                    elif not before:
                        table[kind][how] = OTHER
            tick()
    open_cells = sum(not cell for row in table.values() for cell in row.values())
    rows = [
        Row("largest difference to one rank, relative", worst, Goal(high=RELATION)),
        Row("runs", runs),
        Row("parts", len(table)),
        Row("cells that no spec reached", open_cells, Goal(high=0)),
    ]
    json.dump({"rows": [row.data() for row in rows], "versions": versions(), "table": table}, sys.stdout, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
