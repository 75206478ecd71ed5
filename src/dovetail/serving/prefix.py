"""Prefix cache: blocks of tokens by the hash of everything before them and of their own tokens.

    key(0) = hash(salt, adapter)        key(i) = hash(key(i − 1), tokens of block i)

A node is one block: the page that holds its keys and values, and, at some block edges, a snapshot of the states that do not
lie in pages (recurrent states, caches of blocks). A prompt continues from its longest chain of known blocks that ends where
the states are known. Nodes without children that no row uses are dropped, the least recently used first, when pages are needed.

This file is plain data: pages are numbers, snapshots are opaque. Kwon et al. 2023 (PagedAttention); Zheng et al. 2024
(RadixAttention).
"""

from __future__ import annotations

import dataclasses as dc
import heapq
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

HEAP_SLACK = 64  # entries of the heap of leaves that may be skipped ones


def root_key(salt: str, adapter: str | None) -> bytes:
    """The key before the first block."""
    return blake2b(repr((salt, adapter)).encode(), digest_size=16).digest()


def block_keys(root: bytes, tokens: Sequence[int], block: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """The key of each whole block of tokens; `known` are those of its first blocks."""
    keys = list(known)
    for begin in range(len(keys) * block, len(tokens) - block + 1, block):
        before = keys[-1] if keys else root
        keys.append(blake2b(before + array("q", tokens[begin : begin + block]).tobytes(), digest_size=16).digest())
    return keys


@dc.dataclass(eq=False, slots=True)
class Node:
    """One block of tokens behind its prefix."""

    key: bytes
    parent: Node | None
    page: int | None  # None where no layer has a KV cache
    states: Any | None  # the snapshot at the end of the block; None: not taken
    used: int  # when it was used last
    children: int = 0


class PrefixCache:
    """Blocks that later prompts may begin with."""

    def __init__(self, stateful: bool, hold: Callable[[int], None], drop: Callable[[int], None], snapshots: int) -> None:
        """`stateful`: a prompt can continue only where a snapshot is. `hold` and `drop` count the users of a page. So many
        `snapshots` are kept, those that were used last."""
        self.stateful, self.hold, self.drop, self.snapshots = stateful, hold, drop, snapshots
        self.nodes: dict[bytes, Node] = {}
        self.stated: dict[bytes, Node] = {}  # nodes with a snapshot, the least recently used first
        self.clock = count()
        self.leaves: list[
            tuple[int, int, Node]
        ] = []  # a heap; it has every node without children, and others, which are skipped
        self.numbers = count()

    def __len__(self) -> int:
        return len(self.nodes)

    def match(self, keys: Sequence[bytes]) -> list[Node]:
        """The longest chain of known blocks from which a prompt with these block keys can continue."""
        chain: list[Node] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                break
            chain.append(node)
        while self.stateful and chain and chain[-1].states is None:
            chain.pop()
        now = next(self.clock)
        for node in chain:
            node.used = now
        if chain and chain[-1].states is not None:
            self.stated[chain[-1].key] = self.stated.pop(chain[-1].key)
        return chain

    def insert(self, keys: Sequence[bytes], pages: Sequence[int], states: Any | None) -> list[int]:
        """Add the blocks of a row that are not known yet; `states` is the snapshot at the end of the last. Returns the page of
        each block, which the row must use from now on: a known block keeps its page, and a second copy would pin the first,
        which has children in use and no user."""
        parent, used = None, list[int]()
        for i, key in enumerate(keys):
            node = self.nodes.get(key)
            if node is None:
                page = pages[i] if pages else None
                node = self.nodes[key] = Node(key, parent, page, None, next(self.clock))
                if page is not None:
                    self.hold(page)
                if parent is not None:
                    parent.children += 1
                self._leaf(node)
            if node.page is not None:
                used.append(node.page)
            parent = node
        if parent is not None and states is not None:
            parent.states = states
            self.stated[parent.key] = parent
            while len(self.stated) > self.snapshots:
                self._forget(next(iter(self.stated.values())))
        return used

    def _forget(self, node: Node) -> None:
        """Drop a snapshot, and the blocks that nothing but it needed."""
        del self.stated[node.key]
        node.states = None
        last: Node | None = node
        while last is not None and last.page is None and last.states is None and not last.children:
            self.remove(last)
            last = last.parent

    def evict(self, enough: Callable[[], bool], uses: Callable[[int], int]) -> bool:
        """Drop unused blocks until `enough()`; returns whether it is. uses(page): the users of a page, this cache included."""
        if enough():
            return True
        in_use: list[Node] = []
        while self.leaves and not enough():
            used, _, node = heapq.heappop(self.leaves)
            if self.nodes.get(node.key) is not node or node.children:
                continue
            if node.used != used:  # it was used since
                self._leaf(node)
            elif self._idle(node, uses):
                self.remove(node)
            else:
                in_use.append(node)
        for node in in_use:
            self._leaf(node)
        return enough()

    def _leaf(self, node: Node) -> None:
        """Add a node without children to the heap; where most of its entries are skipped ones, they are left out."""
        heapq.heappush(self.leaves, (node.used, next(self.numbers), node))
        if len(self.leaves) > 2 * len(self.nodes) + HEAP_SLACK:
            self.leaves = [(one.used, next(self.numbers), one) for one in self.nodes.values() if not one.children]
            heapq.heapify(self.leaves)

    def _idle(self, node: Node, uses: Callable[[int], int]) -> bool:
        return node.page is None or uses(node.page) == 1

    def remove(self, node: Node) -> None:
        """Drop one block without children."""
        del self.nodes[node.key]
        self.stated.pop(node.key, None)
        if node.page is not None:
            self.drop(node.page)
        if (parent := node.parent) is not None:
            parent.children -= 1
            if not parent.children:
                self._leaf(parent)
