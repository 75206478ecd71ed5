"""Traits of a model: what its heads, channels, layers and experts do, each with a null distribution and a false-alarm rate.

    findings = dt.look.traits(model, ids)          ids (rows, n), rows of a text
    findings[0].name, findings[0].address          "induction", "layers.1.mixer.pattern[head=3]"
    findings[0].test                               an intervention that tests it: "dt.look.effect(model, …)"

The score of a relation (`look/relations.py`) is compared with that of `draws` shuffled relations, the largest of all heads in
each: the false-alarm rate is per model, and a finding has at most 1 %. The score of a state (`look/states.py`) must reach the
threshold in shuffled texts as well; its false-alarm rate is that of a site and a shuffled text, over the sites that do not
have the trait in the mean over these texts.

The thresholds are effect sizes: a small preference is significant in a long text, and yet no trait.
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, groupby

import torch
from torch import Generator, Tensor

from dovetail.base.errors import InputError, SpecError
from dovetail.look.effects import predicts_tokens
from dovetail.look.judging import SPANS, THRESHOLDS, Hit, Judge, Parts, Site, related, stated
from dovetail.look.mixing import Heard, effective, scans_with_heads
from dovetail.look.relations import FEWEST, Spans, head_traits, shuffled
from dovetail.look.states import copying, entropies, overlaps, residual_scores, silent_experts, silent_neurons
from dovetail.look.tracer import Tracer, listened, trace
from dovetail.model.model import ModelModule
from dovetail.nn.groups import Mixer
from dovetail.spec.fold import taps

TEXTS = 4  # shuffled copies of the text
DRAWS = 99
LISTED = 16  # dead units that an address names
FLOATS = 1 << 26  # of the activations of a text that are held at once
FEWEST_TOKENS = 32  # different ones, of an OV matrix
EVEN = "lambda p: (p > 0) / (p > 0).sum(-1, keepdim=True)"  # attention to all visible keys alike
MEAN = "lambda x: x.mean(1, keepdim=True).expand_as(x)"  # the same residual stream for all tokens
NEVER = "-1e9"  # the logit of an expert that is not chosen
Progress = Callable[[int, int], None]  # layers done, of how many


@dc.dataclass(frozen=True)
class Finding:
    """A trait at an address."""

    name: str
    address: str
    score: float
    threshold: float
    null: float  # the 0.99 quantile of the null distribution; NaN: every site has the trait
    false_alarm: float  # how often the null distribution reaches the score, of a state the threshold; NaN likewise
    evidence: str
    test: str  # Python with `dt`, `model` and `ids`: an intervention that tests it


class Findings(list[Finding]):
    """The traits of a model; `checked`: the number of sites by trait; `skipped`: why a trait was not looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: dict[str, int] = {}
        self.skipped: dict[str, str] = {}

    def __repr__(self) -> str:
        lines = [f"{f.name:18} {f.address:36} {f.score:8.3g}  {f.evidence}\n    {f.test}" for f in self]
        return "\n".join(lines) or "no traits found"


def traits(
    model: ModelModule,
    tokens: Tensor,
    *,
    spans: Spans | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    progress: Progress | None = None,
) -> Findings:
    """Return the traits of a model on a text (rows, n), best of eight rows of 64 tokens or more.

    `spans` names relations of the text: {"coreference": [(row, query, key), …]}, where the key may be a range of tokens.
    `draws` shuffled relations make up each null distribution.
    """
    spec = model.part
    if spec.encoder is not None:
        raise SpecError("encoder", "traits of an encoder–decoder are not defined", "give a decoder, or an encoder by itself")
    if not spec.embed.token_ids or tokens.dim() != 2:
        raise InputError(f"tokens: have the shape {tuple(tokens.shape)}; give ids (rows, n) to a model of tokens")
    search = _Traits(model, tokens.cpu(), seed, draws, progress)
    with torch.no_grad():
        search.heads(spans or {})
        search.copying_heads()
        search.residual()
        search.dead()
    return search.findings


class _Traits:
    """One call of `traits`."""

    def __init__(self, model: ModelModule, tokens: Tensor, seed: int, draws: int, progress: Progress | None) -> None:
        self.model, self.tokens, self.seed, self.draws, self.progress = model, tokens, seed, draws, progress
        self.axes = taps(model.part)
        self.shuffled = torch.cat([shuffled(tokens, seed + 1 + i) for i in range(TEXTS)])
        self.findings = Findings()

    def traced(self, addresses: Sequence[str], *texts: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the activations of each address, one per text; few addresses at once where they are large."""
        size, done = 1, 0
        while done < len(addresses):
            group, largest = addresses[done : done + size], 1
            runs = [trace(self.model, text.to(self.model.device), *group) for text in texts]
            for address in group:
                values = [run.pop(address).cpu() for run in runs]
                largest = max(largest, *(value.numel() for value in values))
                yield address, values
                done += 1
                if self.progress is not None:
                    self.progress(done, len(addresses))
            size = max(1, FLOATS // largest)

    def scanned(self, scans: Mapping[str, Mixer], *texts: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield how much of the effective attention of each head, in absolute values, each token has; one per text."""
        for address, part in scans.items():
            path = address.removesuffix(".pattern")
            maps: list[Tensor] = []
            for text in texts:
                heard = Heard({a for a in self.axes if a.rpartition(".")[0] == path})
                listened(self.model, text.to(self.model.device), heard)
                weights = effective(self.model, path, part, heard).abs()
                maps.append((weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)).cpu())
            yield address, maps

    # -- what makes a finding -------------------------------------------------------------------------------------------

    def hits(self, judge: Judge, name: str, sites: Sequence[Site], parts: Parts) -> list[Hit]:
        """The sites that have a trait."""
        self.findings.checked[name] = len(sites)
        return list(judge(name, sites, parts))

    def add(self, name: str, address: str, hit: Hit, evidence: str, what: str = "", ids: str = "ids") -> None:
        """Add a finding; `what` is the address and the value of its intervention, by default zero at its address."""
        test = f"dt.look.effect(model, {ids}, {what or repr(address)})"
        threshold = THRESHOLDS.get(name, SPANS)
        self.findings.append(Finding(name, address, hit.score, threshold, hit.null, hit.rate, evidence, test))

    def head(self, address: str, heads: str) -> str:
        """The output of heads, or where they have none their pattern; a scan has no tap of its effective attention."""
        if address not in self.axes:
            return f"{address.removesuffix('pattern')}y[head={heads}]"
        z = address.removesuffix("pattern") + "z"
        return f"{z if z in self.axes else address}[head={heads}]"

    # -- heads ----------------------------------------------------------------------------------------------------------

    def heads(self, spans: Spans) -> None:
        """Relations, from patterns and from the effective attention of scans; positional heads and entropies, from patterns."""
        patterns = [a for a, axes in self.axes.items() if axes == "head query key" and a.startswith("layers.")]
        scans = {f"{path}.pattern": part for path, part in scans_with_heads(self.model.part)}
        if not patterns and not scans:
            self.findings.skipped["heads"] = "no layer has attention by head"
            return
        again, relations = head_traits(self.tokens, self.model.part.order() == "causal", spans, self.seed)
        generator = Generator().manual_seed(self.seed)
        nulls = {name: [trait.null(generator) for _ in range(self.draws)] for name, trait in relations.items()}
        sites, parts = list[Site](), defaultdict[str, Parts](list)
        texts = (self.tokens, self.shuffled, again)
        for address, (text, mixed, twice) in chain(self.traced(patterns, *texts), self.scanned(scans, *texts)):
            sites += [(address, head) for head in range(text.shape[1])]
            for name, trait in relations.items():
                pattern = (twice if trait.repeated else text).float()
                drawn = torch.stack([null.mass(pattern) for null in nulls[name]])
                parts[name].append((trait.relation.mass(pattern), drawn))
            if address in scans:  # a decay is positional, whatever the model has learned
                continue
            parts["positional"].append(overlaps(text.float(), mixed[: len(text)].float(), generator, self.draws))
            flat = entropies(text, FEWEST), entropies(mixed, FEWEST)
            parts["uniform"].append(flat)
            parts["low-entropy"].append((1 - flat[0], 1 - flat[1]))
            parts["entropy-collapse"].append((1 - flat[0].mean(-1, keepdim=True), 1 - flat[1].mean(-1, keepdim=True)))
        soft = [site for site in sites if site[0] not in scans]
        known = set[Site]()  # heads that a relation to a position explains
        for name in (*relations, *["positional"] * bool(soft)):
            ids = "dt.look.repeated(ids)" if name in relations and relations[name].repeated else "ids"
            for hit in self.hits(related, name, soft if name == "positional" else sites, parts[name]):
                if name == "positional" and hit.site in known:
                    continue
                known |= {hit.site}
                evidence = f"{hit.score:.2f} of its attention; shuffled, no head has more than {hit.null:.2f}"
                if name == "positional":
                    evidence = f"on shuffled texts {hit.score:.2f} of its attention stays, beyond what moved keys share"
                self.add(
                    name,
                    f"{hit.site[0]}[head={hit.site[1]}]",
                    hit,
                    evidence,
                    repr(self.head(hit.site[0], str(hit.site[1]))),
                    ids,
                )
        if not soft:
            return
        for hit in self.hits(stated, "entropy-collapse", [(address, 0) for address in patterns], parts["entropy-collapse"]):
            known |= {site for site in sites if site[0] == hit.site[0]}
            evidence = f"row entropy {1 - hit.score:.3f} of log n, the mean of its heads"
            self.add("entropy-collapse", hit.site[0], hit, evidence, f"{hit.site[0]!r}, {EVEN}")
        for name in ("uniform", "low-entropy"):
            hits = [hit for hit in self.hits(stated, name, soft, parts[name]) if name == "uniform" or hit.site not in known]
            for address, some in groupby(hits, key=lambda hit: hit.site[0]):
                group = list(some)
                heads = "|".join(str(hit.site[1]) for hit in group)
                least = min(group, key=lambda hit: hit.score)
                entropy = least.score if name == "uniform" else 1 - least.score
                target = repr(self.head(address, heads)) if name != "uniform" else f"'{address}[head={heads}]', {EVEN}"
                bound = "at least" if name == "uniform" else "at most"
                self.add(name, f"{address}[head={heads}]", least, f"row entropy {bound} {entropy:.3f} of log n", target)

    def copying_heads(self) -> None:
        """Heads whose OV matrix raises the logit of the token that they attend to."""
        some = self.tokens[:1, :2].to(self.model.device)
        if not predicts_tokens(self.model, listened(self.model, some, Tracer(self.model.part)), some):
            self.findings.skipped["copying"] = "the model has no logits of the next token"
            return
        shapes = {f"layers.{i}.mixer": ("pos kv_head channel", "pos head channel") for i in range(len(self.model.part.layers))}
        layers = [i for i, (m, axes) in enumerate(shapes.items()) if (self.axes.get(f"{m}.v"), self.axes.get(f"{m}.z")) == axes]
        if not layers or len(torch.unique(self.tokens)) < FEWEST_TOKENS:
            self.findings.skipped["copying"] = "no layer has heads with values, or the text has too few different tokens"
            return
        parts = list(copying(self.model, self.tokens, layers, self.draws, self.seed))
        sites = [(f"layers.{i}.mixer.z", head) for i, part in zip(layers, parts, strict=True) for head in range(len(part[0]))]
        for hit in self.hits(related, "copying", sites, parts):
            evidence = (
                f"Σ Re λ / Σ |λ| of its OV matrix is {hit.score:.2f}; tokens exchanged, no head has more than {hit.null:.2f}"
            )
            self.add("copying", f"{hit.site[0]}[head={hit.site[1]}]", hit, evidence)

    # -- the residual stream, and units that do nothing -----------------------------------------------------------------

    def residual(self) -> None:
        """Massive activations, outlier channels and rank collapse."""
        layers = [f"layers.{i}.in" for i in range(len(self.model.part.layers))]
        parts, sites = defaultdict[str, Parts](list), defaultdict[str, list[Site]](list)
        where: dict[str, Tensor] = {}
        for address, (text, mixed) in self.traced(layers, self.tokens, self.shuffled):
            scores, null = residual_scores(text), residual_scores(mixed)
            where[address] = text.abs().flatten(2, -2).amax(0) if text.dim() > 3 else text.abs().amax(0)
            for name, score in scores.items():
                parts[name].append((score, null[name]))
                sites[name] += [(address, i) for i in range(score.shape[-1])]
        for name, some in parts.items():
            hits = sorted(self.hits(stated, name, sites[name], some), key=lambda hit: hit.site[1])
            for channel, group in groupby(hits, key=lambda hit: hit.site[1]):
                found = list(group)
                best = found[0] if name == "rank-collapse" else max(found, key=lambda hit: hit.score)
                address = best.site[0]
                within = ", ".join(hit.site[0].split(".")[1] for hit in found)
                if name == "rank-collapse":
                    evidence = f"{best.score:.4f} of the residual stream is equal for all tokens; layers {within}"
                    self.add(name, address, best, evidence, f"{address!r}, {MEAN}")
                    continue
                what = "the median absolute value" if name == "massive-activation" else "the median channel"
                token = f", largest at token {int(where[address][:, channel].argmax())}" if name == "massive-activation" else ""
                evidence = f"{best.score:,.0f} times {what} before layer {address.split('.')[1]}{token}; layers {within}"
                self.add(name, f"{address}[channel={channel}]", best, evidence)

    def dead(self) -> None:
        """Neurons and experts that neither the text nor a shuffled one uses."""
        both = torch.cat([self.tokens, self.shuffled])
        neurons = [a for a, axes in self.axes.items() if axes == "pos channel" and fnmatchcase(a, "layers.*.ffn*.hidden")]
        routers = [a for a in self.axes if fnmatchcase(a, "layers.*.router.chosen")]
        for name, addresses in (("dead-neurons", neurons), ("dead-experts", routers)):
            for address, (values,) in self.traced(addresses, both):
                texts = values.split(len(self.tokens))
                if name == "dead-neurons":
                    silent, what, where, value = torch.stack([silent_neurons(x) for x in texts]), "channel", address, ""
                else:
                    where, value = address.removesuffix("chosen") + "logits", f", {NEVER}"
                    experts = trace(self.model, self.tokens[:1].to(self.model.device), where)[where].shape[-1]
                    silent, what = torch.stack([silent_experts(x, experts) for x in texts]), "expert"
                dead = silent.all(0)
                self.findings.checked[name] = self.findings.checked.get(name, 0) + len(dead)
                if not bool(dead.any()):
                    continue
                others = silent[:, ~dead]
                rate, units = (1 + int(others.sum())) / (1 + others.numel()), dead.nonzero()[:, 0].tolist()
                listed = f"{where}[{what}={'|'.join(map(str, units[:LISTED]))}]"
                more = f"; the first {LISTED} are listed" if len(units) > LISTED else ""
                evidence = f"{len(units)} of {len(dead)} do nothing in {both.numel():,} tokens{more}"
                self.add(name, listed, Hit((where, 0), len(units) / len(dead), math.nan, rate), evidence, f"{listed!r}{value}")
