"""Laws that a server is one function of the tokens: whatever is cached, batched, split, scored or repeated.

Rows of log-probs are compared, not texts: a text may part at a near-tie, and then says nothing more.
"""

from __future__ import annotations

from dovetail.proof.answers import Answer
from dovetail.proof.laws.law import NotApplicable
from dovetail.proof.served.case import START, Served, law, new_salt
from dovetail.proof.served.prompts import ServedPrompt

BLOCKS = (16, 32, 64, 128)  # sizes of pages, chunks and checkpoints that engines use
AROUND = sorted({length for b in BLOCKS for length in (b - 1, b, b + 1, 2 * b + 1)})
ROWS = 48  # requests at once where a server promises not to depend on its batch
TEXTS = 3  # texts of law 5


@law(1, "repeat", "the same request again gives the same answer")
def repeat(case: Served) -> None:
    """Ask the same four times over, each past the prefix cache where the server has a way."""
    for length in case.lengths(10, 31, 64, 100):
        prompt = case.prompts.new(length)
        first = case.ask(prompt)
        case.same(case.ask(prompt), first, f"a prompt of {length} tokens, repeated", case.batch_bound)


@law(2, "cached", "a prompt whose prefix is in the cache gives the answer of a cold one")
def cached(case: Served) -> str | None:
    """Repeat prompts of k · b + 1 tokens, and continue them: a hit leaves out the block that a prompt exactly fills."""
    case.quirks.need("logprobs")
    hits = 0
    for length in case.lengths(*(k * b + 1 for b in BLOCKS for k in (1, 2))):
        prompt, salt = case.prompts.new(length), new_salt()
        cold = case.ask(prompt, salt=salt)
        warm = case.ask(prompt, salt=salt)
        hits += warm.cached or 0
        case.same(warm, cold, f"a prompt of {length} tokens, cached and cold")
        if case.quirks.cold != "first" and length + 20 <= case.quirks.longest:
            longer = case.prompts.new(length + 20, prompt)
            warm = case.ask(longer, salt=salt)
            case.same(warm, case.ask(longer), f"a prompt of {length + 20} tokens, {length} of them cached, and cold")
    if case.quirks.reports_cached and hits == 0 and not case.gaps:
        raise NotApplicable("the server reports no cached tokens for any repeated prompt: its prefix cache is off")
    return None if case.quirks.reports_cached else "the server does not report which tokens were cached"


@law(3, "concurrent", "neighbors in a batch do not change an answer")
def concurrent(case: Served) -> str | None:
    """Compare each prompt alone with the same beside others of other lengths: by connections, and as a list of prompts."""
    case.quirks.need("logprobs")
    prompts = [case.prompts.new(length) for length in case.lengths(9, 17, 40, 64, 90, 130)]
    alone = [case.ask(prompt, 12) for prompt in prompts]
    _beside(case, prompts, alone, case.together([case.body(prompt, 12) for prompt in prompts]), "at once")
    if case.quirks.lists:
        _beside(case, prompts, alone, case.listed(prompts, 12), "in one list")
    if case.exact:
        many = [case.prompts.new(12) for _ in range(ROWS)]
        alone = [case.ask(prompt, 2) for prompt in many]
        beside = case.listed(many, 2) if case.quirks.lists else case.together([case.body(prompt, 2) for prompt in many])
        _beside(case, many, alone, beside, f"among {ROWS}")
    return None if case.quirks.lists else "the server takes no lists of prompts"


def _beside(case: Served, prompts: list[ServedPrompt], alone: list[Answer], beside: list[Answer], how: str) -> None:
    case.true(len(beside) == len(prompts), f"{len(beside)} answers to {len(prompts)} prompts")
    for i, (got, want) in enumerate(zip(beside, alone, strict=False)):
        case.same(got, want, f"prompt {i}, {how} and alone", case.batch_bound)


@law(4, "split", "a prompt gives the same log-probs however its prefill is split")
def split(case: Served) -> None:
    """Decode a text; then send its prefixes as prompts that grow under one salt, and whole, in the chunks of the server."""
    case.quirks.need("logprobs", "ids")
    salt = new_salt()
    for length in case.lengths(23, 24, 50, 101, 102, 160, 230):
        _decoded(case, length, "a prompt that grows", salt)
        _decoded(case, length, "a whole prompt", None)


def _decoded(case: Served, length: int, how: str, salt: str | None) -> None:
    """Compare the row after `length` tokens of the sampled text, as a prompt and decoded."""
    prompt, text = case.sampled
    place = length - START
    longer = case.prompts.after(prompt, text, place)
    if longer is not None and place < len(text.steps):
        case.same_first(case.ask(longer, 1, salt), text.steps[place], f"{how}, {length} tokens, and decoded")


@law(5, "lengths", "prompts just below, at and above a block give the log-probs of decoding")
def lengths(case: Served) -> None:
    """Send prefixes of decoded texts whose lengths are b − 1, b, b + 1 and 2 b + 1, alone and at once.

    A fault at the end of a block moves the log-probs of one text much less than those of another, so that there are several.
    """
    case.quirks.need("logprobs", "ids")
    for prompt, text in (case.sampled, *(case.text() for _ in range(TEXTS - 1))):
        _around(case, prompt, text)


def _around(case: Served, prompt: ServedPrompt, text: Answer) -> None:
    places = [length - START for length in case.lengths(*AROUND) if length - START < len(text.steps)]
    longer = [(place, case.prompts.after(prompt, text, place)) for place in places]
    prompts = [(place, one) for place, one in longer if one is not None]
    for place, one in prompts:
        case.same_first(case.ask(one, 1), text.steps[place], f"a prompt of {START + place} tokens, and decoded")
    beside = case.together([case.body(one, 1) for _, one in prompts])
    for (place, _), got in zip(prompts, beside, strict=True):
        case.same_first(got, text.steps[place], f"a prompt of {START + place} tokens beside others, and decoded")


@law(6, "scored", "generated tokens have the log-probs that they have as part of a prompt")
def scored(case: Served) -> None:
    """Sample tokens, then score the prompt with them (echo)."""
    case.quirks.need("logprobs", "ids", "echo")
    for length in case.lengths(20, 40, 88, 130):
        prompt = case.prompts.new(length)
        answer = case.sample(prompt, 16)
        longer = case.prompts.after(prompt, answer, len(answer.tokens))
        if longer is None or longer.ids is None or prompt.ids is None:
            continue
        begin, end = len(prompt.ids), len(longer.ids)
        echo = case.ask(longer, 1, echo=True)
        what = f"{end - begin} tokens after {begin}, generated and scored"
        case.same(Answer(echo.steps[begin:end]), Answer(answer.steps), what)


@law(7, "rescored", "the scores of a prompt do not depend on what was scored before")
def rescored(case: Served) -> None:
    """Score two prompts that share a prefix, one after the other and again."""
    case.quirks.need("echo")
    salt, shared = new_salt(), case.prompts.new(48)
    pair = [case.prompts.new(70, shared) for _ in range(2)]
    first = [case.ask(prompt, 1, salt, echo=True) for prompt in pair]
    for i in (0, 1, 1):
        again = case.ask(pair[i], 1, salt, echo=True)
        scores, want = (answer.steps[: len(pair[i].ids or ())] for answer in (again, first[i]))
        case.same(Answer(scores), Answer(want), f"prompt {i}, scored again after the other")
