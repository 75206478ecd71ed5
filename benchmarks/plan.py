"""Plans against runs: what `dovetail plan` traces on a fake process group, compared with the same layouts on real ranks.

Twelve pairs of a model and a layout train on two or four ranks (gloo, one process and one thread each). Parameters and bytes of
collectives are those of a real step. Memory is the high-water mark of resident memory of the process (VmHWM), less what it had
before; the allocator returns freed memory at once, so that fragments do not count. Steps of all pairs are timed in turns; the
time of a pair is predicted from its trace by rates (FLOP/s, bytes/s, seconds per kernel and per collective) that are fitted to
the other eleven. Four ranks on two cores take twice as long. A ratio is measured ÷ planned.

Then a plan of Llama 3 405B is made for 16,384 GPUs, in the layout of its paper: tensor 8, pipeline 16, data 128, at 8,192
tokens. Its layout at 131,072 tokens, with sequence 16, is not traced: attention of the CPU computes tile by tile, and takes
too many operations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import plan_jobs
from measure import Goal, Row, arguments, middle, progress, report
from scipy.optimize import nnls

from dovetail.files.spec import from_yaml
from dovetail.parallel.layout import Layout
from dovetail.parallel.pair import Pair
from dovetail.planning.cost import StepTrace
from dovetail.planning.stages import trace_stages
from dovetail.planning.trace import Setting, traced_rank
from dovetail.planning.watch import gloo_staging

EQUAL, MEMORY, TIME = Goal(high=0), Goal(0.95, 1.05), Goal(0.85, 1.15)
ENDS = "vocab: 2048\nhead: {kind: lm, tied: false}\n"
SPECS = {
    "llama": f"width: 384\n{ENDS}layers: [{{repeat: 4, mixer: {{heads: 6, kv_heads: 2}}, ffn: {{hidden: 1024}}}}]\n",
    "wide": f"width: 512\n{ENDS}layers: [{{repeat: 2, mixer: {{heads: 8, kv_heads: 8}}, ffn: {{kind: mlp, hidden: 2048}}}}]\n",
    "hybrid": f"width: 256\n{ENDS}layers:\n- repeat: 4\n  pattern: [a, b]\n  a: {{mixer: {{kind: mamba2, state_size: 32}}}}\n"
    "  b: {mixer: {heads: 4, kv_heads: 2}}\n  ffn: {hidden: 768}\n",
}
PAIRS = [
    *(("llama", layout) for layout in (Layout(shards=2), Layout(tensor=2), Layout(sequence=2), Layout(replicas=2))),
    ("llama", Layout(shards=2, tensor=2)),
    ("llama", Layout(pipeline=2, tensor=2)),
    *(("wide", layout) for layout in (Layout(shards=2), Layout(tensor=2), Layout(pipeline=2), Layout(shards=4))),
    *(("hybrid", layout) for layout in (Layout(shards=2), Layout(tensor=2))),
]
QUICK = {name: text.replace("2048", "128") for name, text in SPECS.items()}
LLAMA_405B = {"8,192 tokens": "--length 8192 --shards 128 --batch 2048 --sequence 1"}


def features(trace: StepTrace, ranks: int) -> list[float]:
    """What a step costs: FLOPs, bytes, kernels, bytes of collectives, and their calls; ranks share the cores."""
    cost, busy = trace.cost, max(1.0, ranks / plan_jobs.cores())
    moved = cost.moved + sum(one.bytes * count for one, count in cost.products.items())
    kernels = cost.kernels + cost.products.total()
    calls = sum(one.calls for one in cost.traffic.values())
    return [busy * x for x in (cost.flops, moved, kernels, cost.communicated, calls)]


def predicted(rows: np.ndarray, seconds: np.ndarray, which: int) -> float:
    """The seconds of one pair by rates that are fitted to the others."""
    others = np.arange(len(rows)) != which
    scale = rows.max(0).clip(1e-30)
    weighted = rows[others] / scale / seconds[others, None]  # relative errors count
    rates, _ = nnls(weighted, np.ones(others.sum()))
    return float(rows[which] / scale @ rates)


def plan_405b(flags: str) -> dict[str, Any]:
    """A plan in a process of its own, and its seconds."""
    command = f"{sys.executable} -m dovetail plan llama-3-405b --gpus 16384 --tensor 8 --pipeline 16 --top 1 --json {flags}"
    begin = time.monotonic()
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{command}: {done.stderr[-2000:]}")
    return {**json.loads(done.stdout), "seconds": time.monotonic() - begin}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="times that all pairs are timed in turn")
    flags = parser.parse_args()
    specs, pairs = (QUICK, PAIRS[:2]) if flags.quick else (SPECS, PAIRS)
    setting = Setting(1, 64, 2, "fp32") if flags.quick else Setting(2, 512, 2, "fp32")
    names = [f"{name}, {layout}" for name, layout in pairs]
    rows: list[Row] = []
    with progress("pairs", 2 * len(pairs) + flags.rounds * len(pairs)) as tick:
        traces = []
        for name, layout in pairs:
            traces.append(trace_stages(from_yaml(specs[name]), layout, setting, gloo_staging))
            tick()
        for (name, layout), shown, trace in zip(pairs, names, traces, strict=True):
            with Pair(ranks=layout.ranks, timeout=1800) as ranks:
                taken = ranks.run(plan_jobs.memory, specs[name], layout, setting)[traced_rank(layout)]
                real = ranks.run(plan_jobs.counted, specs[name], layout, setting)[traced_rank(layout)]
            planned = {(kind, *group): traffic.bytes for (kind, group), traffic in trace.cost.traffic.items()}
            keys = planned.keys() | real["sent"].keys()
            apart = sum(abs(planned.get(key, 0) - real["sent"].get(key, 0)) for key in keys)
            rows += [
                Row(f"{shown}: parameters that differ", float(abs(trace.parameters - real["parameters"])), EQUAL),
                Row(f"{shown}: bytes of collectives that differ", float(apart), EQUAL),
                Row(f"{shown}: peak memory", taken / trace.memory.peak, MEMORY),
            ]
            print(*(f"{row.name}: {row.value:g}" for row in rows[-3:]), sep="\n", file=sys.stderr)
            tick()
        seconds: list[list[float]] = [[] for _ in pairs]
        with Pair(ranks=2, timeout=1800) as two, Pair(ranks=4, timeout=1800) as four:
            for _ in range(flags.rounds):
                for times, (name, layout) in zip(seconds, pairs, strict=True):
                    found = {2: two, 4: four}[layout.ranks].run(plan_jobs.timed, specs[name], layout, setting, 5)
                    times += [max(each) for each in zip(*found, strict=True)]
                    tick()
    costs = np.array([features(trace, layout.ranks) for trace, (_, layout) in zip(traces, pairs, strict=True)])
    medians = np.array([middle(times)[0] for times in seconds])
    for i, shown in enumerate(names):
        (value, spread), forecast = middle(seconds[i]), max(predicted(costs, medians, i), 1e-12)
        rows.append(Row(f"{shown}: step time", float(value / forecast), TIME, spread / float(forecast)))
    rows += rows_405b(flags.quick)
    report(rows, flags.json)


def rows_405b(quick: bool) -> list[Row]:
    """The plans of Llama 3 405B in the layouts of its paper."""
    rows: list[Row] = []
    for shown, text in ({} if quick else LLAMA_405B).items():
        found = plan_405b(text)
        peak = found["layouts"][0]["memory"]["peak"] / 1e9 if found["layouts"] else 0.0
        rows += [
            Row(f"405 B on 16,384 GPUs, {shown}: seconds of the plan", found["seconds"], Goal(high=300)),
            Row(f"405 B on 16,384 GPUs, {shown}: the layout of its paper fits", float(found["best"] is not None), Goal(low=1)),
            Row(f"405 B on 16,384 GPUs, {shown}: memory per rank, GB", peak),
        ]
    return rows


if __name__ == "__main__":
    main()
