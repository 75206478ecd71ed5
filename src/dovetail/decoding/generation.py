"""Generation: tokens one by one, with a decode state (KV cache, recurrent state).

A decoder continues the prompt. An encoder–decoder encodes the prompt once, as its source, and decodes from the tokens `start`.
Each step runs in evaluation mode; between two tokens the model is in the caller's mode.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.base.errors import InputError, SpecError
from dovetail.decoding.eviction import Eviction, evicting
from dovetail.decoding.sampling import GREEDY, Sampling, masked, sample_tokens
from dovetail.decoding.steps import WARM, Decoder
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.finite import check_result
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import evaluating
from dovetail.spec.fold import over_vocab, position_limit
from dovetail.state.pool import Pool
from dovetail.state.quantized import CacheFormat

PIECE = 512  # tokens of a prompt that are computed at once where entries are evicted

if TYPE_CHECKING:
    from dovetail.text.chat import ChatTemplate, Message
    from dovetail.text.grammar import Matcher
    from dovetail.text.literal import ConversationEncoder
    from dovetail.text.tokenizer import Tokenizer


def check_generates(spec: Model) -> None:
    """Raise SpecError unless the model predicts the next token and sees no later one, but for the first tokens (a prefix)."""
    if "head" not in over_vocab(spec):
        raise SpecError("head", "the model has no logits over the vocabulary, so it cannot generate", "set head: lm")
    if spec.ahead() is None:
        what = f"the model is not causal{_sees_later(spec)}, so it cannot generate token by token"
        raise SpecError("layers", what, "use a causal mask; join a prefix with it: {any: [causal, {kind: prefix}]}")


def _sees_later(spec: Model) -> str:
    """The first mixer whose tokens see later ones, if it is a mixer."""
    mixers = [(f"layers.{i}.{name}", mixer) for i, one in enumerate(spec.layers) for name, mixer in one.self_mixers().items()]
    return next((f" ({path}: tokens see later ones)" for path, mixer in mixers if mixer.ahead() is None), "")


def generates(spec: Model) -> bool:
    """Whether the model can generate."""
    try:
        check_generates(spec)
    except SpecError:
        return False
    return True


@dc.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with the token ids that begin and end generation, the chat template, the names of classes, and the files that
    hold them."""

    tokenizer: Tokenizer | None = None
    stop: frozenset[int] = frozenset()  # end-of-sequence tokens
    start: tuple[int, ...] = ()  # first decoder tokens of an encoder–decoder
    chat_template: ChatTemplate | None = None
    classes: tuple[str, ...] = ()  # the names of the classes of the head, where the directory has names
    files: Mapping[str, bytes] = dc.field(default_factory=dict)  # written beside the weights when the model is saved


@torch.inference_mode()
def generate_tokens(
    model: ModelModule,
    prompt: Tensor | Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stop: Collection[int] = (),
    start: Sequence[int] = (),
    compiled: bool = False,
    on_compiled: Callable[[float], None] | None = None,
    positions: Tensor | None = None,
    patches: Tensor | None = None,
    cache: CacheFormat | None = None,
    matcher: Matcher | None = None,
    listen: Listener | None = None,
    evict: Eviction | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue the prompt (n,), fewer where a table of positions ends. A token of
    `stop` ends generation, and is yielded, too. `compiled` decodes by compiled graphs, which take seconds to minutes to make;
    `on_compiled` is called with that time, before the first token is yielded. `positions` (n, c) are the coordinates of the
    prompt's tokens; those of the new tokens continue them. `patches` are the images that some of its ids stand for. `cache` is
    the format of the KV cache; None: the dtype of the model. `matcher` restricts the tokens to those of a grammar; generation
    ends where its text is complete. `listen` reads and replaces activations in every step. `evict` holds the KV cache of full
    attention to a budget (eviction.py).
    """
    if evict is not None:
        evict.check_options(compiled=compiled, cache=cache is not None, positions=positions is not None)
        model = evicting(model, evict)
    spec, device = model.part, model.device
    check_generates(spec)
    inputs = torch.as_tensor(prompt, dtype=torch.long, device=device)
    if not len(inputs):
        raise SpecError("prompt", "is empty", "give at least one token")
    max_tokens = token_limit(spec, len(inputs), max_tokens)
    coords = 0 if positions is None else _coordinates(positions, len(inputs), spec)
    held = {} if evict is None else evict.pool()
    pool = pool_for(model, 1, len(inputs) + len(start) + max_tokens, len(inputs), coords=coords, cache=cache, **held)
    if spec.encoder is not None:
        encode_source(model, pool, inputs, listen=listen)
        inputs = torch.tensor(list(start), dtype=torch.long, device=device)
        if not len(inputs):
            raise SpecError("start", "an encoder–decoder needs a first decoder token", "give decoder_start_token_id")
    _check_prefix(spec, len(inputs))
    given_ids, generated = inputs.tolist(), list[int]()
    if compiled and listen is not None:
        raise InputError("compiled: a compiled graph has no listener; decode eagerly to trace or patch")
    if compiled and cache is not None:
        raise SpecError("cache", f"a KV cache in {cache} is not decoded by compiled graphs", "leave out one of the two")
    compiled = compiled and max_tokens > WARM  # fewer would be compiled for nothing
    decoder = Decoder(model, pool, compiled=compiled, listen=listen)
    if evict is not None and patches is None and listen is None:  # a prompt at once would need memory for all its keys
        while len(inputs) > PIECE:
            decoder.step(inputs[None, :PIECE], [0])
            inputs = inputs[PIECE:]
    for number in range(max_tokens):
        given = None if positions is None or number else [positions]
        logits = _checked(decoder.step(inputs[None], [0], given, None if number else patches), number)
        allowed = logits if matcher is None else masked(logits[0], matcher.mask())[None]
        (token,) = sample_tokens(allowed, [sampling], [given_ids], [generated])
        generated.append(token)
        if matcher is not None:
            matcher.push(token)
        if compiled and number == 0:
            seconds = decoder.warm_up([0])
            if on_compiled is not None:
                on_compiled(seconds)
        yield token
        if token in stop or (matcher is not None and matcher.finished):
            return
        inputs = torch.tensor([token], device=device)


@torch.inference_mode()
def generate_batch(
    decoder: Decoder,
    prompts: Tensor | Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stop: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of each of some prompts, (rows, n) or of several lengths, up to `max_tokens` times; fewer where a
    table of positions ends. A row ends with a token of `stop`, and yields None from then on, until all rows have ended.

    The rows of the decoder's pool are freed first. Its compiled graphs stay, so that only the first call compiles.
    """
    model, rows = decoder.model, range(len(prompts))
    check_generates(model.part)
    if model.part.encoder is not None:
        raise SpecError("encoder", "an encoder–decoder is not decoded in a batch", "call generate_tokens for each source")
    ids = [torch.as_tensor(prompt, dtype=torch.long, device=model.device) for prompt in prompts]
    if not ids or not min(map(len, ids)):
        raise SpecError("prompts", "are empty" if not ids else "hold an empty one", "give at least one token each")
    _check_prefix(model.part, min(map(len, ids)))
    max_tokens = token_limit(model.part, max(map(len, ids)), max_tokens)
    for row in range(decoder.pool.rows):
        decoder.pool.free(row)
    given, generated, ended = [one.tolist() for one in ids], [list[int]() for _ in rows], [False for _ in rows]
    inputs = None
    for number in range(max_tokens):
        logits = _prefill(decoder, ids) if inputs is None else decoder.step(inputs, rows)
        tokens = sample_tokens(_checked(logits, number), [sampling] * len(rows), given, generated)
        if number == 0 and max_tokens > WARM and not decoder.warm:
            decoder.warm_up(rows)
        for row, token in enumerate(tokens):
            generated[row].append(token)
        yield [None if over else token for token, over in zip(tokens, ended, strict=True)]
        ended = [over or token in stop for token, over in zip(tokens, ended, strict=True)]
        if all(ended):
            return
        inputs = torch.tensor(tokens, device=model.device)[:, None]


def _prefill(decoder: Decoder, prompts: Sequence[Tensor]) -> Tensor:
    """The logits (rows, vocab) after each prompt (n,); prompts of one length are one step."""
    if len({len(prompt) for prompt in prompts}) == 1:
        return decoder.step(torch.stack(list(prompts)), range(len(prompts)))
    return torch.cat([decoder.step(prompt[None], [row]) for row, prompt in enumerate(prompts)])


def _checked(logits: Tensor, number: int) -> Tensor:
    """Logits (rows, vocab) in float32 on the CPU, where tokens are sampled; raise where one is not finite."""
    logits = logits.float()
    check_result(logits, f"logits of token {number + 1}")
    return logits.cpu()


def prompt_ids(vocabulary: Vocabulary, prompt: str, *, chat: bool = False, system: str | None = None) -> list[int]:
    """Return the token ids of a prompt; with `chat`, of a user message (behind a system message) in the chat template."""
    if vocabulary.tokenizer is None:
        remedy = "give token ids, or load a model directory with a tokenizer.json"
        raise InputError(f"prompt: is text, but the model has no tokenizer; {remedy}")
    if not chat:
        if system is not None:
            raise InputError("system: is a message of a chat; give chat=True, or leave it out")
        return vocabulary.tokenizer.prompt(prompt)
    if vocabulary.chat_template is None:
        raise InputError("chat: the model has no chat template; give the prompt without it")
    before = [] if system is None else [{"role": "system", "content": system}]
    from dovetail.text.literal import ConversationEncoder

    messages = [*before, {"role": "user", "content": prompt}]
    return chat_ids(ConversationEncoder(vocabulary.tokenizer, vocabulary.chat_template, vocabulary.stop), messages)


def chat_ids(encoder: ConversationEncoder, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation; its template writes the special tokens, and those inside messages are text."""
    marked = encoder.mark(messages)
    return encoder.ids(encoder.template.render(marked.messages), marked.mark)


def generate_pieces(
    model: ModelModule,
    vocabulary: Vocabulary,
    ids: Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stop: Collection[int] = (),
    continues: bool = True,
    compiled: bool = False,
    on_compiled: Callable[[float], None] | None = None,
    cache: CacheFormat | None = None,
    matcher: Matcher | None = None,
    listen: Listener | None = None,
    evict: Eviction | None = None,
) -> Iterator[tuple[int | None, str]]:
    """Yield each token that follows a prompt of these ids with the text that is final now, which may be empty; at the end
    None with the rest of the text. A token of `stop` ends generation and has no text.

    `continues`: the text follows that of the prompt, so that its first word may need a space before it; never so for an
    encoder–decoder, whose prompt is its source.
    """
    from dovetail.text.stream import TextStream

    tokenizer = vocabulary.tokenizer
    assert tokenizer is not None, "text needs a tokenizer"
    if ids and max(ids) >= model.part.vocab:
        raise SpecError("vocab", f"{model.part.vocab} is too small for token id {max(ids)} of the tokenizer")
    stream = TextStream(tokenizer, ids if continues and model.part.encoder is None else ())
    tokens = generate_tokens(
        model,
        ids,
        max_tokens,
        sampling,
        stop=stop,
        start=vocabulary.start,
        compiled=compiled,
        on_compiled=on_compiled,
        cache=cache,
        matcher=matcher,
        listen=listen,
        evict=evict,
    )
    for token in tokens:
        yield token, "" if token in stop else stream.push(token)
    yield None, stream.end()


def token_limit(spec: Model, prompt: int, max_tokens: int) -> int:
    """Return how many tokens can follow a prompt before a table of positions ends."""
    if max_tokens < 0:
        raise SpecError("max_tokens", f"{max_tokens} is below 0")
    longest = position_limit(spec)
    if longest is None or spec.encoder is not None:
        return max_tokens
    if prompt >= longest:
        raise SpecError("prompt", f"has {prompt} tokens; the model takes at most {longest}", "shorten it")
    return min(max_tokens, longest - prompt)


def _check_prefix(spec: Model, prompt: int) -> None:
    """Raise SpecError where a prompt is shorter than the prefix whose tokens see each other."""
    if prompt < (ahead := spec.ahead() or 0):
        raise SpecError("prompt", f"has {prompt} tokens; the first {ahead} see each other", f"give {ahead} or more")


def _coordinates(positions: Tensor, prompt: int, spec: Model) -> int:
    """Return the number of coordinates per token of a prompt."""
    if spec.encoder is not None:
        raise SpecError("positions", "are those of a decoder's prompt; an encoder–decoder's prompt is its source", "give none")
    if positions.dim() != 2 or len(positions) != prompt:
        raise SpecError("positions", f"have the shape {tuple(positions.shape)}", f"give ({prompt}, coordinates)")
    return positions.shape[1]


def pool_for(model: ModelModule, rows: int, capacity: int, source: int, **options: Any) -> Pool:
    """Return a pool of a model's dtype, device and shards; `source` is the number of tokens of an encoder's source."""
    cuts = model.ranks.cuts
    return Pool(model.part, rows, capacity, dtype=model.dtype, device=model.device, source=source, sharded=cuts, **options)


def encode_source(model: ModelModule, pool: Pool, source: Tensor, row: int = 0, listen: Listener | None = None) -> None:
    """Run the encoder on the source (m,) and store its keys and values for every cross-attention of a row."""
    ctx = Ctx(layout=TokenLayout.whole(1, len(source), source.device), taps=listen, ranks=model.ranks)
    with evaluating(model):
        output, layout = model.encode(source[None], ctx)
        views = pool.admit([row], [output.shape[1]])
        ctx = Ctx(layout=layout, encoder_output=output, encoder_layout=layout, taps=listen, ranks=model.ranks)
        model.fill(ctx, views)
