"""Speculative decoding: drafts change no token, sampled tokens have the target's distribution, and what a draft saves.

    python benchmarks/speculate.py [--json] [--quick]

Three small models (attention, a hybrid with Mamba-2, a mixture of experts) that have learned a made-up text, in which each word
has four successors. The prompts are from another text of the same words: no request is one that was learned. Drafts come from
prompt look-up, from lookahead, from a model of one layer, from the model's own multi-token prediction, two depths of one block,
and, trained on the frozen model, from three Medusa heads (Medusa-1) and from one block of EAGLE. With a share α of the drafts
accepted, k drafts give 1 + α + … + α^k tokens per step of the target; that formula is set beside the speed-up. At this size a
step is mostly Python: the speed-up says what the engine saves, not what a large model would.

Sampling by a uniform number per (seed, token number) makes the sampled tokens equal, too, so that the chi-square test of the
distribution is one of the sampler as well.        Leviathan et al. 2023; Cai et al. 2024 (Medusa); Fu et al. 2024; Li et al.
2024 (EAGLE)
"""

from __future__ import annotations

import dataclasses as dc
import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from measure import Goal, Row, arguments, middle, progress, report, seconds

import dovetail as dt
from dovetail.decoding.sampling import GREEDY, Sampling
from dovetail.model.transformer import Transformer
from dovetail.serving.draft_ahead import own_drafter
from dovetail.serving.engine import Engine
from dovetail.serving.lookahead import Lookahead
from dovetail.serving.request import Request
from dovetail.serving.speculate import Drafter, DraftModel, PromptLookup
from dovetail.text.learn import learn
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.optim import train_only, weights_named

ATTENTION = "{mixer: {heads: 2, head: 16}, ffn: {hidden: 64}}"
MAMBA = "{mixer: {kind: mamba2, inner: 64, head: 16, state_size: 16}, ffn: {hidden: 64}}"
EXPERTS = "{mixer: {heads: 2, head: 16}, ffn: {kind: moe, experts: 4, hidden: 32}}"
SPECS = {"attention": [ATTENTION] * 3, "Mamba-2 hybrid": [MAMBA, ATTENTION, MAMBA], "experts": [EXPERTS] * 3}
DEPTHS = {"attention": [ATTENTION] * 2, "Mamba-2 hybrid": [MAMBA, ATTENTION], "experts": [EXPERTS] * 2}
HEADS = 3  # of Medusa
HEAD, BLOCK = {"kind": "medusa", "weight": 1.0}, {"mixer": {"heads": 2, "head": 16}, "ffn": {"hidden": 64}}
AHEAD = {"medusa": [HEAD] * HEADS, "eagle": [{"kind": "eagle", "weight": 1.0, "block": BLOCK}]}
DRAFT, DRAFTS = [ATTENTION], 4
SURE = 0.01  # of a chi-square test: it fails by chance once in a hundred runs
WORDS, SUCCESSORS = 60, (0.6, 0.2, 0.1, 0.1)
LEARNED, HELD_OUT = 4000, 3000  # words


@dc.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    prompts: int = 200
    steps: int = 150
    draws: int = 4000
    rounds: int = 5
    new: int = 24
    timed: int = 4  # requests, one at a time


def text(seed: int, count: int) -> str:
    """Words, each one of the successors of the word before; which these are is the same for every seed."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(2)) for _ in range(2 * WORDS)})[
        :WORDS
    ]
    after = {word: rng.sample(words, len(SUCCESSORS)) for word in words}
    rng, chain = random.Random(seed), [words[0]]
    while len(chain) < count:
        chain += rng.choices(after[chain[-1]], SUCCESSORS)
    return " ".join(chain)


def trained(layers: list[str], tokenizer: Tokenizer, steps: int, depths: Sequence[str] = ()) -> Transformer:
    """A model that has learned the text, with these blocks for multi-token prediction."""
    ahead = ", ".join(f"{{block: {block}}}" for block in depths)
    spec = dt.from_yaml(f"{{width: 32, vocab: {tokenizer.size}, layers: [{', '.join(layers)}], mtp: [{ahead}]}}")
    return learn_text(dt.build(spec, seed=1), tokenizer, steps)


def with_ahead(model: Transformer, ahead: Sequence[object], tokenizer: Tokenizer, steps: int) -> Transformer:
    """The same model with other multi-token prediction, which alone is trained."""
    other = dt.build(model.spec.set("mtp", ahead), seed=1)
    other.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name[:4] != "mtp."}, strict=False)
    train_only(other, weights_named(other.spec, ["mtp.*"]) or [])
    return learn_text(other, tokenizer, steps)


def learn_text(model: Transformer, tokenizer: Tokenizer, steps: int) -> Transformer:
    """The model after some steps on the text, of 32 windows each."""
    windows = tokenizer.encode(text(1, LEARNED)).unfold(0, 64, 8)
    order = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        model.loss(windows[torch.randint(len(windows), (32,), generator=order)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def requests(tokenizer: Tokenizer, sizes: Sizes, sampling: Sampling) -> list[Request]:
    """Prompts of different lengths, which were not learned."""
    ids, rng = tokenizer.encode(text(2, HELD_OUT)).tolist(), random.Random(1)
    cuts = [(rng.randrange(len(ids) - 90), rng.randrange(4, 90)) for _ in range(sizes.prompts)]
    return [
        Request(id=str(i), prompt=tuple(ids[begin : begin + n]), max_tokens=sizes.new, sampling=sampling)
        for i, (begin, n) in enumerate(cuts)
    ]


def answered(
    model: Transformer, asked: list[Request], drafter: Drafter | None, rows: int = 4
) -> tuple[Engine, dict[str, list[int]]]:
    """The tokens of each request, and the engine that computed them."""
    engine = Engine(model, rows=rows, longest=256, drafter=drafter, drafts=DRAFTS, share=False)
    for request in asked:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.tokens)
    return engine, tokens


def figures(
    name: str, model: Transformer, ahead: Mapping[str, Transformer], smaller: Transformer, tokenizer: Tokenizer, sizes: Sizes
) -> list[Row]:
    """The rows of one model; `ahead` is the same model with other multi-token prediction."""
    rows: list[Row] = []
    asked = requests(tokenizer, sizes, GREEDY)
    _, want = answered(model, asked, None)
    drafters: dict[str, tuple[Transformer, Callable[[], Drafter], int]] = {  # and the drafts per step
        "look-up": (model, PromptLookup, DRAFTS),
        "lookahead": (model, lambda: Lookahead(model), DRAFTS),
        "draft model": (model, lambda: DraftModel(smaller, rows=4, longest=256, target=model), DRAFTS),
        "mtp": (model, lambda: own(model), min(DRAFTS, len(model.spec.mtp))),
        "medusa": (ahead["medusa"], lambda: own(ahead["medusa"]), min(DRAFTS, HEADS)),
        "eagle": (ahead["eagle"], lambda: own(ahead["eagle"]), DRAFTS),
    }
    for how, (target, make, drafts) in drafters.items():
        engine, got = answered(target, asked, make())
        differ = sum(got[one.id] != want[one.id] for one in asked)
        rows.append(Row(f"{name}, {how}: of {len(asked)} greedy texts, those that differ", differ, Goal(high=0)))
        share = engine.accepted / max(engine.drafted, 1)
        rows.append(Row(f"{name}, {how}: share of the drafts accepted", share))
        rows.append(speed_up(f"{name}, {how}", target, asked[: sizes.timed], make, drafts, share, sizes))
    return rows


def own(model: Transformer, rows: int = 4) -> Drafter:
    """The drafter of a model's own multi-token prediction."""
    return own_drafter(model, rows=rows, longest=256, drafts=DRAFTS)


def speed_up(
    name: str, model: Transformer, asked: list[Request], make: Callable[[], Drafter], drafts: int, share: float, sizes: Sizes
) -> Row:
    """Time without drafts ÷ with, one request at a time, beside the formula."""
    ratios = []
    for _ in range(sizes.rounds + 1):
        plain = seconds(lambda: answered(model, asked, None, rows=1))
        ratios.append(plain / seconds(lambda: answered(model, asked, make(), rows=1)))
    value, spread = middle(ratios[1:])
    formula = sum(share**i for i in range(drafts + 1))
    how = f"{len(asked)} requests, one at a time (tokens per step by the formula at this share: {formula:.2f})"
    return Row(f"{name}: speed-up, {how}", value, None, spread)


def chi_square(how: str, drafter: Drafter, model: Transformer, tokenizer: Tokenizer, draws: int) -> list[Row]:
    """Third tokens, which are sampled behind a draft of the second where that is accepted, against the model's own probs summed
    over the first two."""
    prompt = tuple(tokenizer.encode(text(2, HELD_OUT)).tolist()[:120])  # look-up finds the last words there
    asked = [
        Request(id=str(i), prompt=prompt, max_tokens=3, sampling=Sampling(temperature=1.3, top_k=8, seed=i))
        for i in range(draws)
    ]
    engine, got = answered(model, asked, drafter, rows=8)
    probs = third(model, prompt)
    counts = torch.zeros_like(probs)
    for tokens in got.values():
        counts[tokens[2]] += 1
    likely = probs * draws >= 5  # cells with fewer are put together
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([probs[likely], probs[~likely].sum()[None]]) * draws
    used = expected > 0
    freedom = int(used.sum()) - 1
    p = 0.0
    if not bool(seen[~used].any()):
        half = float(((seen - expected)[used] ** 2 / expected[used]).sum()) / 2
        p = float(torch.special.gammaincc(*(torch.tensor(x, dtype=torch.float64) for x in (freedom / 2, half))))
    what = f"{draws} tokens sampled behind drafts by {how}"
    return [
        Row(f"chi-square of {what}, {freedom} degrees of freedom: probability", p, Goal(low=SURE)),
        Row(f"{what}: accepted drafts", engine.accepted, Goal(low=1)),
    ]


@torch.inference_mode()
def third(model: Transformer, prompt: tuple[int, ...]) -> torch.Tensor:
    """The probs (vocab,) of the third token behind a prompt."""
    texts, weights = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(2):
        probs = weights[:, None] * top(model(texts)[:, -1])
        rows, tokens = probs.nonzero(as_tuple=True)
        texts, weights = torch.cat([texts[rows], tokens[:, None]], 1), probs[rows, tokens]
    return (weights[:, None] * top(model(texts)[:, -1])).sum(0)


def top(logits: torch.Tensor) -> torch.Tensor:
    """The probs (…, vocab) that the requests sample from."""
    logits = logits.double() / 1.3
    least = logits.topk(8).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf).softmax(-1)


def main() -> None:
    """Take the figures and print them."""
    parser = arguments(__doc__ or "")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = Sizes(prompts=6, steps=5, draws=200, rounds=1, new=8, timed=1) if given.quick else Sizes()
    tokenizer = learn(text(1, LEARNED), 400)
    smaller = trained(DRAFT, tokenizer, sizes.steps)
    rows: list[Row] = []
    with progress("speculate", len(SPECS)) as tick:
        for name, layers in SPECS.items():
            model = trained(layers, tokenizer, sizes.steps, DEPTHS[name])
            ahead = {kind: with_ahead(model, depths, tokenizer, sizes.steps) for kind, depths in AHEAD.items()}
            rows += figures(name, model, ahead, smaller, tokenizer, sizes)
            if name == "attention":
                drafters = (
                    ("look-up", model, PromptLookup()),
                    ("lookahead", model, Lookahead(model)),
                    ("mtp", model, own(model, 8)),
                    *((kind, target, own(target, 8)) for kind, target in ahead.items()),
                )
                for how, target, drafter in drafters:
                    rows += chi_square(how, drafter, target, tokenizer, sizes.draws)
            tick()
    report(rows, given.json)


if __name__ == "__main__":
    main()
