"""Unknown keywords: a call with a keyword that a public function does not have raises, and names the one that was meant.

    model.generate(ids, temprature=0.7)
    KeywordError: Transformer.generate(): unknown keyword 'temprature'; did you mean temperature?

`checks_keywords` decorates a function, or a class: its constructor and each method with options. The decorated signature stays
what type checkers, editors and `inspect.signature` read. Methods without options stay undecorated, since they run inside the
forward pass; Python itself refuses their unknown keywords.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from dovetail.base.errors import KeywordError, did_you_mean
from dovetail.base.option_group import groups_of

T = TypeVar("T", bound=Callable[..., Any])

# Keywords of other libraries whose counterpart here has a name, or a shape, that no spelling suggests.
ELSEWHERE = {
    "labels": "model.loss(ids) is the loss of the next token; for other targets call model.loss(ids, targets), shifted by you",
    "position_ids": "give positions=",
    "token_type_ids": "give types=",
    "input_ids": "ids are the first argument, without a keyword",
    "inputs_embeds": "a model takes ids; replace its embeddings by model.trace(ids, 'head.logits', patch={'embedded': …})",
    "past_key_values": "the KV cache belongs to model.generate, or to a Ctx whose views come from dt.Pool",
    "use_cache": "model.generate always has a KV cache, a forward pass never; leave it out",
    "max_new_tokens": "give max_tokens=",
    "max_length": "give max_tokens=, which counts the new tokens only",
    "do_sample": "temperature=0 takes the most probable token, any other temperature samples",
    "num_beams": "beam search is dovetail.decoding.beam.beam_search",
    "eos_token_id": "give stop=[token ids]",
    "output_attentions": "call model.trace(ids, 'layers.*.mixer.pattern')",
    "output_hidden_states": "call model.trace(ids, 'layers.*.in', 'normed')",
    "pixel_values": "images are the first argument of a vision model; beside text give patches=",
    "decoder_input_ids": "ids are those of the decoder; the encoder reads source=",
    "device_map": "build and load make a model on one device; call model.to(device)",
    "torch_dtype": "give dtype=",
}


def checks_keywords(public: T) -> T:
    """Decorate a function, or the constructor and the methods of a class, to raise KeywordError for an unknown keyword."""
    if not isinstance(public, type):
        return cast("T", _checked(public, public.__qualname__))
    cls: type[Any] = public
    for name, value in list(vars(cls).items()):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if not inspect.isfunction(function) or not has_options(function):
            continue
        # not a function of another module that the class only names (an activation of torch)
        if name == "__init__" or (not name.startswith("_") and function.__module__ == cls.__module__):
            checked = _checked(function, cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}")
            setattr(cls, name, type(value)(checked) if function is not value else checked)
    return cast("T", cls)


def has_options(function: Callable[..., Any]) -> bool:
    """Whether a parameter can be given by keyword and left out."""
    return any(
        p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY for p in inspect.signature(function).parameters.values()
    )


def keyword_error(called: str, name: str, known: Iterable[str]) -> KeywordError:
    """The error for one unknown keyword of a call."""
    names = [other for other in known if other != "self"]
    remedy = ELSEWHERE.get(name) or did_you_mean(name, names) or f"keywords: {', '.join(names) or 'none'}"
    return KeywordError(f"{called}(): unknown keyword {name!r}; {remedy}")


def _checked(function: Callable[..., Any], called: str) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(f"{called}: takes any keyword, so none can be refused; name its parameters")
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known += [field for group in groups_of(function).values() for field in vars(group)]

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                raise keyword_error(called, name, known)
        return function(*args, **keywords)

    return call
