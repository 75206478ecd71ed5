"""The prefix cache on plain data: numbers for pages, strings for snapshots."""

from __future__ import annotations

import random
from collections import Counter

from dovetail.serving.prefix import PrefixCache, block_keys, root_key

ROOT = root_key("", None)


def keys(*tokens: int) -> list[bytes]:
    return block_keys(ROOT, tokens, 2)


def test_keys_depend_on_all_tokens_before_and_on_the_root() -> None:
    assert keys(1, 2, 3, 4)[1] != keys(9, 2, 3, 4)[1]
    assert keys(1, 2, 3, 4)[0] == keys(1, 2, 9, 9)[0]
    assert block_keys(root_key("salt", None), [1, 2], 2) != block_keys(root_key("", "salt"), [1, 2], 2) != keys(1, 2)
    assert len(keys(1, 2, 3)) == 1
    assert block_keys(ROOT, [1, 2, 3, 4], 2, known=keys(1, 2)) == keys(1, 2, 3, 4)


def test_pages_are_counted_and_the_least_recently_used_leaf_goes_first() -> None:
    uses: Counter[int] = Counter()

    def drop(page: int) -> None:
        uses[page] -= 1

    cache = PrefixCache(False, lambda page: uses.update([page]), drop, 0)
    cache.insert(keys(1, 2, 3, 4), [0, 1], None)
    cache.insert(keys(1, 2, 5, 6), [0, 2], None)
    cache.insert(keys(7, 8), [3], None)
    assert uses == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [node.page for node in cache.match(keys(1, 2, 3, 4))] == [0, 1]  # used last
    uses[3] += 1  # a row uses this page: its block stays
    assert cache.evict(lambda: uses[2] == 0, lambda page: uses[page])
    assert uses[1] == 1
    assert not cache.evict(lambda: False, lambda page: uses[page])
    assert [node.page for node in cache.nodes.values()] == [3]


def test_a_model_with_recurrent_states_continues_where_a_snapshot_is_and_keeps_a_bounded_number() -> None:
    cache = PrefixCache(True, lambda page: None, lambda page: None, 3)
    cache.insert(keys(1, 2, 3, 4), [], "after 4")
    cache.insert(keys(1, 2, 3, 4, 5, 6, 7, 8), [], "after 8")
    assert [node.states for node in cache.match(keys(1, 2, 3, 4, 5, 6))] == [None, "after 4"]
    rng = random.Random(0)
    for i in range(200):
        cache.insert(keys(*(rng.randrange(100) for _ in range(8))), [], i)
        cache.match(keys(1, 2, 3, 4))  # stays, since it is used
        assert len(cache.stated) <= 3
        assert len(cache) <= 3 * 4
    assert [node.states for node in cache.match(keys(1, 2, 3, 4))][-1] == "after 4"


def test_an_eviction_costs_what_it_evicts_and_not_what_is_cached() -> None:
    asked: Counter[str] = Counter()
    pages = set(range(5000))
    cache = PrefixCache(False, pages.discard, pages.add, 0)
    for i in range(5000):
        cache.insert(keys(i, i), [i], None)

    def uses(page: int) -> int:
        asked["uses"] += 1
        return 2 if page < 4 else 1  # rows use the oldest four

    for freed in range(1, 4):
        assert cache.evict(lambda: len(pages) >= freed, uses)  # noqa: B023
    assert pages == {4, 5, 6}  # the least recently used of those that no row uses
    assert asked["uses"] <= 3 * 5


def test_random_programs_evict_the_least_recently_used_idle_leaf() -> None:
    """Against a search through all nodes, with uses by rows, nodes that become leaves again, and snapshots."""
    rng, uses = random.Random(2), Counter[int]()

    def drop(page: int) -> None:
        uses[page] -= 1

    cache, page, dropped = PrefixCache(False, lambda one: uses.update([one]), drop, 0), 0, 0
    for _ in range(600):
        tokens = [rng.randrange(3) for _ in range(2 * rng.randrange(1, 6))]
        if rng.random() < 0.5:
            blocks = keys(*tokens)
            cache.insert(blocks, list(range(page, page + len(blocks))), None)
            page += len(blocks)
        elif rng.random() < 0.6:
            cache.match(keys(*tokens))
        else:
            busy = {node.page for node in cache.nodes.values() if rng.random() < 0.2}
            idle = [node for node in cache.nodes.values() if not node.children and node.page not in busy]
            before = set(cache.nodes)
            count = len(cache)
            found = cache.evict(lambda: len(cache) < count, lambda one: uses[one] + (one in busy))  # noqa: B023
            assert found == bool(idle)
            if idle:
                (gone,) = before - set(cache.nodes)
                dropped += 1
                assert gone in {node.key for node in idle if node.used == min(one.used for one in idle)}
        assert len(cache.leaves) <= 2 * len(cache) + 65
    assert dropped > 50


def test_snapshots_are_those_of_known_blocks_whatever_the_order_of_calls() -> None:
    rng, free = random.Random(3), set[int]()
    cache, page, evicted = PrefixCache(True, lambda page: None, free.add, 3), 0, 0
    for at in range(600):
        blocks = keys(*(rng.randrange(3) for _ in range(2 * rng.randrange(1, 5))))
        choice = rng.randrange(3)
        if choice == 0:
            cache.insert(blocks, list(range(page, page + len(blocks))), f"after {at}" if rng.random() < 0.7 else None)
            page += len(blocks)
        elif choice == 1 and (chain := cache.match(blocks)):
            assert chain[-1].states is not None
        elif choice == 2:
            count = len(cache)
            evicted += cache.evict(lambda: len(cache) < count, lambda page: 1)  # noqa: B023
        assert cache.stated == {key: node for key, node in cache.nodes.items() if node.states is not None}
        assert len(cache.stated) <= 3
    assert evicted > 50
