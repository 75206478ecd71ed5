"""Which replica a prompt goes to: the one whose prefix cache has most of it, unless it is much busier than the others.

    key_0 = hash(API key, model)        key_i = hash(key_{i-1}, characters 64·(i-1) to 64·i of the prompt)

64 characters are about 16 tokens, two pages of the KV cache. Two prompts share key_i where their first 64·i characters are
the same, so the longest known key names the replica. Prompts of two API keys share no key, as the engine shares no prefix
between them. It is a guess of what a cache has: the router does not ask the replicas, and forgets the keys used longest ago.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from hashlib import blake2b

from dovetail.core.limits import REQUEST_ITEMS

BLOCK = 64  # characters per key
BLOCKS = 1024  # keys of one prompt: beyond them, prompts are not told apart
KEYS = 1 << 18  # that a router remembers
FIELDS = ("messages", "prompt", "input")  # of a body, which have the prompt


def prefix_keys(tenant: str, body: bytes) -> tuple[bytes, ...]:
    """Return a key per block of a request's prompt; none where the body has no prompt, which the replica refuses."""
    if sum(body.count(sign) for sign in (b"[", b"{", b",")) > REQUEST_ITEMS:
        return ()
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(data, dict):
        return ()
    text = next((_text(data[name]) for name in FIELDS if name in data), "")[: BLOCK * BLOCKS]
    key, keys = _hash(b"", repr((tenant, data.get("model"), data.get("cache_salt")))), list[bytes]()
    for begin in range(0, len(text) - BLOCK + 1, BLOCK):
        key = _hash(key, text[begin : begin + BLOCK])
        keys.append(key)
    return tuple(keys)


def _text(prompt: object) -> str:
    """A string that begins alike for prompts that begin alike: JSON of a list, without its last bracket."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)[:-1]


def _hash(before: bytes, text: str) -> bytes:
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Placement:
    """The replica that each prefix went to last."""

    def __init__(self, slack: int = 4, limit: int = KEYS) -> None:
        """`slack`: a replica with so many requests more than the least busy one gets no further ones for its prefixes."""
        self.slack, self.limit = slack, limit
        self.places: OrderedDict[bytes, str] = OrderedDict()  # the key used longest ago is first

    def find(self, keys: Sequence[bytes], replicas: Container[str]) -> str | None:
        """Return the replica that has the longest known prefix."""
        for key in reversed(keys):
            if (place := self.places.get(key)) is not None and place in replicas:
                return place
        return None

    def record(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember where a prompt went. Its first keys are the newest, so that a chain is forgotten from its end."""
        for key in reversed(keys):
            self.places[key] = replica
            self.places.move_to_end(key)
        while len(self.places) > self.limit:
            self.places.popitem(last=False)

    def ranks(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[list[str]]:
        """Return the replicas in the order in which a prompt may go to them; `loads` are their requests in flight. Of a
        rank, the least busy one is to be taken, and of several such the first: their order is random."""
        every = random.sample(list(loads), len(loads))
        place = self.find(keys, loads)
        if place is None:
            return [every]
        others = [one for one in every if one != place]
        return [others, [place]] if loads[place] - min(loads.values()) > self.slack else [[place], others]
