"""What looking costs: no listener, all residual streams cached, a patching sweep beside two libraries, a stream to disk.

The model is a Llama of 12 layers with random weights. The sweep patches the residual stream before each layer at each of 64
positions; TransformerLens and nnsight have the same weights, in environments of their own (benchmarks/peers/make), and every
metric is compared before the time is. The stream writes a residual stream of a million tokens; `resident` is the memory of this
process at its end ÷ after its first tenth.

    python benchmarks/look.py [--rounds 7] [--only tap cache sweep stream] [--cpu-time --threads 1] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import json
import tempfile
from pathlib import Path

import torch
from measure import Goal, Row, agree, arguments, middle, on_cpu_time, progress, report, taking_steps, taking_turns
from peer import PEERS_RUN, Process, against_process
from safetensors.torch import save_file
from torch import Tensor

import dovetail as dt
from dovetail.hf.hf import export_tensors, to_hf
from dovetail.nn.ctx import Ctx
from dovetail.nn.inputs import default_ctx

PARTS = ("tap", "cache", "sweep", "stream")
PEERS = ("transformer-lens", "nnsight")


@dc.dataclass(frozen=True)
class Shape:
    """The sizes of the model and of the work."""

    width: int = 256
    layers: int = 12
    heads: int = 8
    vocab: int = 1000
    batch: int = 8
    length: int = 256  # of a row, where nothing is patched
    positions: int = 64
    streamed: int = 1_000_000  # tokens, in all rounds
    steps: int = 5  # forward passes per round

    def build(self) -> dt.Transformer:
        """The model."""
        layer = f"{{repeat: {self.layers}, mixer: {{heads: {self.heads}}}, ffn: {{hidden: {4 * self.width}}}}}"
        head = "{kind: lm, tied: false}"
        return dt.build(dt.from_yaml(f"{{width: {self.width}, vocab: {self.vocab}, layers: [{layer}], head: {head}}}"))


QUICK = Shape(width=32, layers=3, heads=4, vocab=62, batch=2, length=32, positions=6, streamed=4096, steps=2)


def tap(model: dt.Transformer, ids: Tensor, shape: Shape, rounds: int) -> list[Row]:
    """The time without a listener ÷ that of the same model whose taps return their argument; one row of tokens per pass, in
    which taps weigh more than in a batch."""
    plain, one = Ctx.tap, ids[:1]

    @torch.no_grad()
    def ours(_: int) -> None:
        model(one)

    def without(i: int) -> None:
        Ctx.tap = lambda self, module, name, x: x  # type: ignore[method-assign]
        try:
            ours(i)
        finally:
            Ctx.tap = plain  # type: ignore[method-assign]

    with progress("no listener ÷ no taps", rounds + 1) as tick:
        ratios = taking_steps(without, ours, shape.steps * shape.batch, rounds, tick)
    value, spread = middle(ratios)
    return [Row("time, no listener ÷ taps that return their argument", value, Goal(high=1.01), spread)]


def cache(model: dt.Transformer, ids: Tensor, shape: Shape, rounds: int) -> list[Row]:
    """The time of a forward pass that keeps all residual streams ÷ that of one without."""

    @torch.no_grad()
    def plain(_: int) -> None:
        model(ids)

    def kept(_: int) -> None:
        dt.look.trace(model, ids, "layers.*.in")

    with progress("all residuals ÷ plain", rounds + 1) as tick:
        value, spread = middle(taking_steps(plain, kept, shape.steps, rounds, tick))
    return [Row("time, all residual streams cached ÷ plain", value, Goal(high=1.10), spread)]


def sweep(model: dt.Transformer, shape: Shape, rounds: int, options: list[str], peers: tuple[str, ...]) -> list[Row]:
    """The time of the patching sweep ÷ that of each peer, for texts that differ at the middle token and at the first."""
    clean, (a, b) = torch.randint(shape.vocab, (1, shape.positions), generator=torch.Generator().manual_seed(1)), (3, 5)
    corrupt = dict[str, Tensor]()
    for where, at in (("the middle token", shape.positions // 2), ("the first token", 0)):
        corrupt[where] = clean.clone()
        corrupt[where][:, at] = (clean[:, at] + 1) % shape.vocab
    rows, found = list[Row](), list[Tensor]()

    def ours(where: str) -> None:
        metric = dt.look.sweep(model, clean, corrupt[where], "layers.*.resid[pos]", lambda x: x[:, -1, a] - x[:, -1, b]).metric
        found[:] = [torch.tensor(list(metric.values())).view(shape.layers, shape.positions)]

    with tempfile.TemporaryDirectory() as place:
        config = to_hf(model.part, length=shape.positions).config
        (Path(place) / "config.json").write_text(json.dumps(dict(config)))
        tensors = export_tensors(model.part, model.state_dict())
        save_file({key: tensor.float().contiguous() for key, tensor in tensors.items()}, f"{place}/model.safetensors")
        for name in peers:
            process = Process(name, "patching_worker.py", name, place, *options)
            for where, text in corrupt.items():
                ours(where)

                def theirs(process: Process = process, text: Tensor = text) -> float:
                    answer = process.ask(clean=clean.tolist(), corrupt=text.tolist(), answers=[a, b])
                    agree(f"the sweep of {process.name}", found[0], torch.tensor(answer["metric"]), 1e-3)
                    return answer["seconds"]

                with progress(f"sweep ÷ {name}, texts that differ at {where}", rounds + 1) as tick:
                    ratios = against_process(lambda where=where: ours(where), theirs, rounds, tick)
                value, spread = middle([1 / ratio for ratio in ratios])
                what = f"time, {shape.layers} layers × {shape.positions} positions patched, texts that differ at {where}"
                rows.append(Row(f"{what} ÷ {name} {process.version}", value, Goal(high=0.5), spread))
            process.close()
    return rows


def resident() -> float:
    """The memory of this process in bytes, without pages that are mapped from files."""
    return 1024 * float(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line).split()[1]
    )


def stream(model: dt.Transformer, shape: Shape, rounds: int) -> list[Row]:
    """The speed of a stream to disk ÷ that of the forward passes, of which a quarter is run, and the growth of memory over all
    rounds."""
    count = max(1, shape.streamed // (shape.batch * shape.length * (rounds + 1)))  # batches per round
    ids = torch.randint(shape.vocab, (count * shape.batch, shape.length), generator=torch.Generator().manual_seed(2))
    some = -(-count // 4)
    address, used = f"layers.{shape.layers // 2}.in", list[float]()

    @torch.inference_mode()
    def plain() -> None:
        for batch in ids.split(shape.batch)[:some]:
            model.hidden(batch, default_ctx(batch))

    def written() -> None:
        with tempfile.TemporaryDirectory() as place:
            dt.look.stream(model, ids, address, out=place, batch=shape.batch, progress=lambda _: used.append(resident()))

    with progress("stream ÷ forward", rounds + 1) as tick:
        ratios = taking_turns(plain, written, rounds, tick)
    value, spread = middle([count / some / ratio for ratio in ratios])
    tokens = len(used) * shape.batch * shape.length
    return [
        Row("speed of a stream to disk ÷ forward passes", value, Goal(low=0.8), spread),
        Row("tokens streamed", tokens),
        Row("resident memory at the end ÷ after a tenth", used[-1] / used[len(used) // 10], Goal(high=1.05)),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, for a machine with other load; one thread")
    flags = parser.parse_args()
    if flags.cpu_time and flags.threads != 1:
        parser.error("--cpu-time: is the sum over threads; give --threads 1")
    if flags.cpu_time:
        on_cpu_time()
    torch.set_num_threads(flags.threads)
    shape = QUICK if flags.quick else Shape()
    model, rows = shape.build(), list[Row]()
    ids = torch.randint(shape.vocab, (shape.batch, shape.length), generator=torch.Generator().manual_seed(0))
    if "tap" in flags.only:
        rows += tap(model, ids, shape, flags.rounds)
    if "cache" in flags.only:
        rows += cache(model, ids, shape, flags.rounds)
    if "sweep" in flags.only:
        options = [f"--threads={flags.threads}", *["--cpu-time"] * flags.cpu_time]
        rows += sweep(model, shape, flags.rounds, options, tuple(flags.peers))
    if "stream" in flags.only:
        rows += stream(model, shape, flags.rounds)
    report(rows, flags.json, peers=PEERS_RUN)


if __name__ == "__main__":
    main()
