"""Transformer: a built model with everything that people call on one: logits, loss, generation, traces.

    logits = model(ids)                                           (batch, n) -> (batch, n, vocab)
    logits = model(ids, attention_mask=mask)                      padded on either side; or lengths=[5, 3]
    loss = model.loss(ids)                                        next token; in training mode with dropout and router losses
    text = model.generate("Once upon", max_tokens=64)             text in, text out; ids in, ids out
    tags = model.tag(["Ada", "slept"])                            per word, of a model with a token classifier
    activations = model.trace(ids, "layers.*.mixer.pattern")      by address; grad=True, patch={address: value}

The forward pass itself is in model/model.py and takes a Ctx. Here a Ctx is made from plain arguments; whoever needs another one
(a decode state, listeners, packed documents) passes `ctx=` instead. Decoding and looking stand above this room: the methods
that call them import them.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.base.keywords import checks_keywords
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.inputs import default_ctx
from dovetail.nn.loss import IGNORED
from dovetail.spec.fold import over_vocab

if TYPE_CHECKING:
    from dovetail.decoding.eviction import Policy
    from dovetail.decoding.generation import Vocabulary
    from dovetail.look.intervention import Replacement
    from dovetail.look.record import Trace
    from dovetail.look.tracer import Tracer
    from dovetail.text.tokenizer import Tokenizer

Ids = Tensor | Sequence[int]
T = TypeVar("T")


class BatchContext(NamedTuple):
    """What describes a batch beside its inputs. Either attention_mask or lengths; neither: whole sequences without padding."""

    attention_mask: Tensor | None = None  # (batch, n), 0 at padding, which is on the left or on the right of a row
    lengths: Tensor | Sequence[int] | None = None  # (batch,), tokens per row, padded on the right
    types: Tensor | None = None  # (batch, n), token types, where the embedding has them
    positions: Tensor | None = (
        None  # (batch, n) or (batch, n, c): coordinates that differ from the order of the tokens (images)
    )
    patches: Tensor | None = None  # (p, channels, height, width): the images that ids beyond the vocabulary stand for
    source: Tensor | None = None  # (batch, m), the ids that the encoder of an encoder–decoder reads
    source_mask: Tensor | None = None  # (batch, m), 0 at padding of the source


WHOLE = BatchContext()


class GenerateOptions(TypedDict, total=False):
    """The options of `generate`, for the types of its results."""

    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    stop: Collection[int] | None
    positions: Tensor | None
    patches: Tensor | None
    compiled: bool
    chat: bool
    system: str | None
    trace: Trace | None
    patch: Mapping[str, Replacement] | None
    evict: Policy | None
    evict_to: int | None


@checks_keywords
class Transformer(ModelModule):
    """A model with its weights. `model.spec` is its spec; `model.vocabulary` its tokenizer and end-of-sequence tokens."""

    def setup(self) -> None:
        super().setup()
        self.vocabulary: Vocabulary | None = None
        self.predicts_next = "head" in over_vocab(self.part) and self.part.order() == "causal"

    @property
    def spec(self) -> Model:
        """The spec that the model was built from."""
        return self.part

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the directory that the model was loaded from; None where there is none."""
        return None if self.vocabulary is None else self.vocabulary.tokenizer

    def forward(
        self,
        inputs: Tensor,
        ctx: Ctx | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        patches: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (batch, n, vocab), or what the head computes, for token ids (batch, n) or images. The keywords describe
        padding and the source of an encoder–decoder (`BatchContext`); a Ctx takes their place."""
        batch = BatchContext(attention_mask, lengths, types, positions, patches, source, source_mask)
        return super().forward(inputs, self._ctx(inputs, ctx, batch))

    if TYPE_CHECKING:  # nn.Module declares that it returns Any, and a plain assignment would inherit that

        @property
        def __call__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.forward

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        ctx: Ctx | None = None,
        *,
        attention_mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        patches: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss, a scalar; the other arguments are those of a forward pass.

        Without targets it is the loss of predicting the next token. Else targets[i] is what position i predicts (the caller
        shifts; Hugging Face shifts inside), −100 where nothing is predicted; padding never counts. In training mode dropout is
        drawn anew at each call, from torch's default generator, and the losses of routers and of multi-token prediction are
        added.
        """
        given = ctx is not None
        batch = BatchContext(attention_mask, lengths, types, positions, patches, source, source_mask)
        ctx = self._ctx(inputs, ctx, batch)
        if targets is None:
            targets = self._next_tokens(inputs, ctx)
        elif not given:
            targets = self._checked(targets, inputs, ctx)
        return super().loss(inputs, targets, ctx)

    def losses(
        self,
        ids: Tensor,
        *,
        evict: Policy | None = None,
        evict_to: int | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Return the loss (rows, n − 1) of each next token of ids (rows, n), computed in pieces with a KV cache; `evict` and
        `evict_to` are those of `generate`. `watch` is called with (tokens so far, tokens in all)."""
        from dovetail.decoding.eviction import given_eviction
        from dovetail.decoding.scoring import token_losses

        return token_losses(self, ids, given_eviction(evict, evict_to), watch)

    # -- tags

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes of the head, in their order; None where the directory of the model had none."""
        from dovetail.decoding.tagging import class_count

        names = () if self.vocabulary is None else self.vocabulary.classes
        return names if names and len(names) == class_count(self.part) else None

    def tag(self, words: Sequence[str]) -> list[str | int | None]:
        """Return the most probable tag of each word of a text, of a model that was trained on tagged words: its name, or its
        number where the model has no names; None where a word has no token of its own."""
        from dovetail.decoding.tagging import classes_of_words

        if self.tokenizer is None:
            raise InputError("words: the model has no tokenizer; load it from a directory that holds tokenizer.json")
        names = self.class_names
        classes = classes_of_words(self, self.tokenizer, words)
        return [number if names is None or number is None else names[number] for number in classes]

    # -- generation and inspection

    @overload
    def generate(
        self, prompt: str, max_tokens: int = ..., *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self, prompt: str, max_tokens: int = ..., *, stream: Literal[False] = ..., **options: Unpack[GenerateOptions]
    ) -> str: ...

    @overload
    def generate(
        self, prompt: Ids, max_tokens: int = ..., *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Iterator[int]: ...

    @overload
    def generate(
        self, prompt: Ids, max_tokens: int = ..., *, stream: Literal[False] = ..., **options: Unpack[GenerateOptions]
    ) -> list[int]: ...

    def generate(
        self,
        prompt: str | Ids,
        max_tokens: int = 128,
        *,
        stream: bool = False,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Collection[int] | None = None,
        positions: Tensor | None = None,
        patches: Tensor | None = None,
        compiled: bool = False,
        chat: bool = False,
        system: str | None = None,
        trace: Trace | None = None,
        patch: Mapping[str, Replacement] | None = None,
        evict: Policy | None = None,
        evict_to: int | None = None,
    ) -> str | list[int] | Iterator[str] | Iterator[int]:
        """Return what follows a prompt: text for text, token ids for ids (n,); with stream=True an iterator over pieces.

        Generation ends at a token of `stop` (by default the end-of-sequence tokens of the model) or after max_tokens. An
        encoder–decoder reads the prompt as its source. temperature 0 takes the most probable token; top_k samples from the K
        most probable tokens, top_p from the fewest tokens whose probs sum to it. positions (n, c) are coordinates of the
        prompt's ids that differ from their order; patches (p, channels, height, width) the images that ids beyond the
        vocabulary stand for. compiled decodes by compiled graphs: seconds to minutes to make, then faster. chat
        renders the prompt with the model's chat template, as a user message, after the message `system`. trace records the
        activations that it names, of every step, and patch replaces some: `{"layers.3.in[pos=4]": dt.look.steer(v, 8.0)}`.
        evict holds the KV cache of full attention to evict_to entries per layer, 1,024 by default: it drops the `oldest` token
        or the least `attended`, or keeps the first tokens as `sinks` and a window (decoding/eviction.py).
        """
        from dovetail.decoding.eviction import given_eviction
        from dovetail.decoding.generation import Sampling, Vocabulary, generate_pieces, generate_tokens, prompt_ids
        from dovetail.look.tracer import Tracer

        eviction = given_eviction(evict, evict_to)
        tracer = None if trace is None and not patch else Tracer(self.part, trace, patch)
        vocabulary = self.vocabulary or Vocabulary()
        ends = vocabulary.stop if stop is None else frozenset(stop)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        if isinstance(prompt, str):
            for name, value in (("positions", positions), ("patches", patches)):
                if value is not None:
                    raise InputError(f"{name}: belong to token ids; give the prompt as ids, not as text")
            ids = prompt_ids(vocabulary, prompt, chat=chat, system=system)
            how: dict[str, Any] = {"compiled": compiled, "listen": tracer, "evict": eviction}
            pieces = generate_pieces(self, vocabulary, ids, max_tokens, sampling, stop=ends, continues=not chat, **how)
            text = _traced((piece for _, piece in pieces if piece), tracer)
            return text if stream else "".join(text)
        if chat or system is not None:
            raise InputError(f"{'chat' if chat else 'system'}: renders messages of text; give the prompt as text, not as ids")
        tokens = generate_tokens(
            self,
            _one_row(prompt),
            max_tokens,
            sampling,
            stop=ends,
            start=vocabulary.start,
            compiled=compiled,
            positions=positions,
            patches=patches,
            listen=tracer,
            evict=eviction,
        )
        tokens = _traced(tokens, tracer)
        return tokens if stream else list(tokens)

    def trace(
        self,
        inputs: Tensor | Sequence[str],
        *patterns: str,
        grad: bool = False,
        patch: Mapping[str, Replacement] | None = None,
        ctx: Ctx | None = None,
        attention_mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        patches: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Trace:
        """Return the activations at the addresses that match a pattern, by address; other arguments as in a forward pass.
        Inputs may be texts, which are one batch, padded on the right (`lengths` says how many tokens each has).

        grad=True keeps the graph, so that a backward pass from one activation gives the gradients of the others. patch replaces
        activations: {address: a tensor, a number, or a function of the activation}.
        """
        from dovetail.look.tracer import trace

        if not isinstance(inputs, Tensor):
            inputs, lengths = self._padded(inputs)
        batch = BatchContext(attention_mask, lengths, types, positions, patches, source, source_mask)
        return trace(self, inputs, *patterns, ctx=self._ctx(inputs, ctx, batch), grad=grad, patch=patch)

    # -- arguments

    def _padded(self, texts: Sequence[str]) -> tuple[Tensor, list[int]]:
        """Return the ids (batch, n) of texts, padded on the right, and the number of tokens of each."""
        from dovetail.decoding.generation import Vocabulary, prompt_ids

        if isinstance(texts, str) or not texts:
            raise InputError("inputs: are ids (batch, n), or several texts; give one text as [text]")
        rows = [prompt_ids(self.vocabulary or Vocabulary(), text) for text in texts]
        lengths = [len(row) for row in rows]
        return torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=self.device), lengths

    def _ctx(self, inputs: Tensor, ctx: Ctx | None = None, batch: BatchContext = WHOLE) -> Ctx:
        """Return the Ctx given, or one made from plain arguments."""
        if ctx is not None:
            if names := [name for name, value in zip(batch._fields, batch, strict=True) if value is not None]:
                raise InputError(f"{', '.join(names)}: ctx holds the layout and the source already; pass only ctx")
            return ctx
        source, source_mask = batch.source, batch.source_mask
        ctx = default_ctx(
            inputs,
            ranks=self.ranks,
            attention_mask=batch.attention_mask,
            lengths=batch.lengths,
            types=batch.types,
            positions=batch.positions,
            patches=batch.patches,
        )
        if self.part.encoder is None:
            if source is not None or source_mask is not None:
                raise InputError("source: the model has no encoder to read it")
            return ctx
        if source is None:
            raise InputError("source: an encoder–decoder needs it; call model(ids, source=source_ids)")
        losses = Losses() if self.training else None  # router losses of the encoder and of the decoder are collected together
        encoder_ctx = default_ctx(source, ranks=self.ranks, attention_mask=source_mask, name="source")
        encoder_ctx = dc.replace(encoder_ctx.for_mode(self), losses=losses)
        output, layout = self.encode(source, encoder_ctx)
        return dc.replace(ctx, encoder_output=output, encoder_layout=layout, losses=losses, draws=encoder_ctx.draws)

    def _next_tokens(self, inputs: Tensor, ctx: Ctx) -> Tensor:
        """Return the target of each position: the next token of its document, −100 where there is none."""
        if not self.predicts_next:
            raise InputError(
                "targets: this model does not predict the next token, so it needs them; call model.loss(ids, targets)"
            )
        return ctx.layout.next_of(inputs, IGNORED)

    def _checked(self, targets: Tensor, inputs: Tensor, ctx: Ctx) -> Tensor:
        """Return targets per token with −100 at padding; raise where they are the inputs of a causal model, unshifted."""
        if targets.shape != inputs.shape or targets.is_floating_point():
            return targets  # one per document, or vectors: the head checks them
        if self.predicts_next and not torch.compiler.is_compiling():
            counted = targets != IGNORED
            shifted = torch.equal(targets[:, :-1], inputs[:, 1:])  # rows of one repeated token
            if bool(counted.any()) and torch.equal(targets[counted], inputs[counted]) and not shifted:
                remedy = "call model.loss(ids) for the next-token loss, or shift them: ids[:, :-1], ids[:, 1:]"
                raise InputError(
                    f"targets: are equal to the inputs, so each position would predict the token that it reads; {remedy}"
                )
        return torch.where(ctx.layout.real, targets, IGNORED)


def _traced(pieces: Iterator[T], tracer: Tracer | None) -> Iterator[T]:
    """The pieces; after the last, the trace is filled."""
    yield from pieces
    if tracer is not None:
        tracer.end()


def _one_row(prompt: Ids) -> Tensor:
    ids = torch.as_tensor(prompt, dtype=torch.long)
    if ids.dim() == 2 and len(ids) == 1:
        return ids[0]
    if ids.dim() != 1:
        raise InputError(f"prompt: has the shape {tuple(ids.shape)}; give the ids (n,) of one sequence per call")
    return ids
