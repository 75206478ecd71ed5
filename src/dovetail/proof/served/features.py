"""Laws on what a server offers around the function: streams, n, seeds, stop strings, aborted requests, speculation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import exp, log

from dovetail.proof.answers import Answer, TokenStep
from dovetail.proof.laws.law import NotApplicable
from dovetail.proof.served.case import Served, at_once, law, new_salt
from dovetail.proof.served.prompts import ServedPrompt

SEEDS = 6  # seeded requests that are repeated beside others
FLIPS = 0.1  # of seeded tokens, at most, may change by rounding: a draw falls between two tokens
EVIDENCE = log(100.0)  # for independent draws against repeated ones, that fails the law
LATER = 0.02  # seconds by which neighbors precede a request
STOP = 3  # characters of a stop string
NEVER = "\u2603\u2603\u2603"  # of a stop string that is never completed
BROKEN = "\ufffd"  # bytes that form no character yet


@law(8, "streamed", "a streamed answer equals the whole answer: its text, tokens and log-probs")
def streamed(case: Served) -> None:
    """Ask for the same answer whole and as a stream."""
    case.quirks.need("streams")
    for length in case.lengths(12, 40, 75):
        prompt = case.prompts.new(length)
        whole, stream = case.ask(prompt, 12), case.stream(prompt, 12)
        what = f"a prompt of {length} tokens, streamed and whole"
        case.true(len(stream.steps) == len(whole.steps), f"{what}: {len(stream.steps)} and {len(whole.steps)} log-probs")
        flips = case.flips
        case.same(stream, whole, what)
        case.true(case.flips > flips or stream.text == whole.text, f"{what}: the texts differ")


@law(9, "choices", "each of n choices has the log-probs of a separate request")
def choices(case: Served) -> str | None:
    """Compare the first row of every choice, and its last one given the tokens before it. Seeds of choices are a convention."""
    case.quirks.need("choices", "logprobs")
    for length in case.lengths(12, 50):
        prompt = case.prompts.new(length)
        separate, answers = case.ask(prompt, 1), case.choices(prompt, n=3, temperature=1)
        case.true(len(answers) == 3, f"{len(answers)} choices where n is 3")
        for i, answer in enumerate(answers):
            if separate.steps:  # else the likeliest token ends the text
                case.same_first(answer, separate.steps[0], f"choice {i}, its first token, and a separate request")
            longer = case.prompts.after(prompt, answer, len(answer.tokens) - 1) if answer.steps else None
            if longer is not None:
                case.same_first(case.ask(longer, 1), answer.steps[-1], f"choice {i}, its last token, and a separate request")
    return None


@law(10, "seeded", "a seeded request samples the same tokens beside unseeded neighbors")
def seeded(case: Served) -> str | None:
    """Weigh two hypotheses token by token: repeated draws, of which rounding changes few, against independent draws."""
    case.quirks.need("seeds", "logprobs")
    repeated = possible = 0.0  # log-likelihood ratios: of what was seen, and of draws that differ at once
    agreed = parted = 0
    for seed in range(1, SEEDS + 1):
        prompt, neighbors = case.prompts.new(16), [case.prompts.new(20) for _ in range(3)]
        alone = case.ask(prompt, temperature=1, seed=seed)
        if not alone.steps and alone.finish == "stop":
            continue  # the first token that was drawn ends the text
        bodies = [case.body(other, 40, temperature=1) for other in neighbors]
        body = case.body(prompt, temperature=1, seed=seed)
        beside = at_once([lambda body=body: _later(case, body), *(lambda b=b: case.client.complete(b)[0] for b in bodies)])[0]
        case.compared += 1
        possible += log(FLIPS / (1 - _collision(alone.steps[0])))
        for step, got, want in zip(alone.steps, beside.tokens, alone.tokens, strict=False):
            chance = _collision(step)
            repeated += log((1 - FLIPS) / chance) if got == want else log(FLIPS / (1 - chance))
            agreed, parted = agreed + (got == want), parted + (got != want)
            if got != want:
                break
    if possible > -EVIDENCE:
        raise NotApplicable("the server's distributions are too peaked: independent draws would agree")
    case.true(repeated > -EVIDENCE, f"seeded requests beside others part at once: {agreed} tokens agree, {parted} do not")
    return f"{parted} of {SEEDS} texts part, as rounding may make them" if parted else None


def _later(case: Served, body: dict[str, object]) -> Answer:
    time.sleep(LATER)
    return case.client.complete(body)[0]


def _collision(step: TokenStep) -> float:
    """The probability that two independent draws from a row agree."""
    probs = [exp(min(value, 0.0)) for value in step.row().values()]
    rest = max(0.0, 1 - sum(probs))
    return min(max(sum(p * p for p in probs) + rest * min(probs), 0.01), 0.99)


@law(11, "stops", "an answer ends before a stop string, streamed and whole")
def stops(case: Served) -> str | None:
    """Ask for an answer again with a piece of its own text as the stop string."""
    case.quirks.need("stops")
    for length in case.lengths(14, 30, 60):
        prompt = case.prompts.new(length)
        free = case.ask(prompt, 16)
        stop = _stop_of(free.text)
        if stop is None:
            continue
        want = free.text[: free.text.index(stop)]
        for how, got, parted in _stopped(case, prompt, [stop], want):
            leaks = got.text != want and not parted
            case.true(not leaks and stop not in got.text, f"{how}, stop {stop!r}: gives {got.text[-20:]!r} for {want[-20:]!r}")
            case.true(parted or got.finish == "stop", f"{how}, stop {stop!r}: finish_reason is {got.finish!r}")
    if not case.compared:
        raise NotApplicable("no answer holds a piece of plain text that could be a stop string")
    return None


@law(14, "held_back", "a stop string that never completes changes no text, streamed and whole, however the answer ends")
def held_back(case: Served) -> None:
    """Ask again with a stop string that the answer begins at its end and never completes: at the last token, and before another
    stop string, which completes."""
    case.quirks.need("stops")
    for length in case.lengths(14, 30, 60):
        prompt = case.prompts.new(length)
        free = case.ask(prompt, 16)
        if NEVER in free.text or BROKEN in free.text or len(free.text) < STOP:
            continue
        ends = {"at the end": ([free.text[-STOP:] + NEVER], free.text, free.finish)}
        stop = _stop_of(free.text)
        before = "" if stop is None else free.text[: free.text.index(stop)]
        if stop is not None and before:
            ends["before another"] = ([before[-STOP:] + NEVER, stop], before, "stop")
        for where, (stops, want, finish) in ends.items():
            for how, got, parted in _stopped(case, prompt, stops, want):
                what = f"{how}, a stop string that is begun {where} and not completed"
                case.true(parted or got.text == want, f"{what}: gives {got.text[-20:]!r} for {want[-20:]!r}")
                case.true(parted or got.finish == finish, f"{what}: finish_reason is {got.finish!r}")
    if not case.compared:
        raise NotApplicable("no answer holds plain text that could begin a stop string")


def _stopped(case: Served, prompt: ServedPrompt, stops: list[str], want: str) -> Iterator[tuple[str, Answer, bool]]:
    """(how, answer, whether its text parts from the wanted one at a near-tie) for the prompt, whole and streamed."""
    runs: dict[str, Callable[..., Answer]] = {"whole": case.ask}
    if "streams" not in case.quirks.lacks:
        runs["streamed"] = case.stream
    for how, run in runs.items():
        got = run(prompt, 16, stop=stops)
        parted = not (got.text.startswith(want) or want.startswith(got.text))
        case.flips += parted
        yield how, got, parted


def _stop_of(text: str) -> str | None:
    """A few plain characters from behind the first third of a text."""
    for i in range(len(text) // 3, len(text) - STOP - 1):
        piece = text[i : i + STOP]
        if piece.isascii() and piece.isprintable() and not piece.isspace():
            return piece
    return None


@law(12, "aborted", "a request that is aborted changes neither its neighbors nor what the cache holds")
def aborted(case: Served) -> None:
    """Abort streams beside a running request; then send the aborted prompts again, cached and cold."""
    case.quirks.need("streams", "logprobs")
    salt, neighbor = new_salt(), case.prompts.new(30)
    victims = [case.prompts.new(length) for length in case.lengths(65, 97, 200)]
    alone = case.ask(neighbor, 24)

    def abort(body: dict[str, object]) -> Answer:
        case.client.abort(body, 2)
        return Answer()

    bodies = [case.body(victim, 48, salt) for victim in victims]
    beside = case.body(neighbor, 24)
    answers = at_once([lambda: case.client.complete(beside)[0], *(lambda b=b: abort(b) for b in bodies)])
    case.same(answers[0], alone, "a request beside aborted ones, and alone")
    for length in case.lengths(90, 120, 200):  # takes the memory that the aborted requests freed
        case.ask(case.prompts.new(length), 1)
    for victim in victims:
        warm = case.ask(victim, salt=salt)
        length = len(victim.ids or ())
        case.same(warm, case.ask(victim), f"an aborted prompt of {length} tokens, cached and cold")


@law(13, "speculated", "a server with speculation gives the answers of one without")
def speculated(case: Served) -> None:
    """Send the same prompts to both servers: random ones, and ones that repeat themselves, which n-gram drafts continue."""
    other = case.other
    if other is None:
        raise NotApplicable("it needs a second server, with speculation off: --against URL")
    if "logprobs" in case.quirks.lacks or "logprobs" in other.quirks.lacks:
        raise NotApplicable("one of the servers gives no log-probs")
    bound = max(case.bound, other.bound)
    prompts = [case.prompts.new(length) for length in case.lengths(12, 40, 90)]
    for prompt in [*prompts, *(case.prompts.repeating(length) for length in case.lengths(20, 41, 83))]:
        case.same(case.ask(prompt, 24), other.ask(prompt, 24), f"a prompt of {len(prompt.ids or ())} tokens, on both", bound)
