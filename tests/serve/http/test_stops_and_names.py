"""Stop strings and names of tokens, piece by piece."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from dovetail.serving.http.choice import StopStrings
from dovetail.serving.http.logprobs import TokenNames
from dovetail.text.learn import KINDS, learn


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder, text, shown = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        shown += finder.push(piece)
        places = [text.find(stop) for stop in stops if stop in text]
        if finder.found:
            assert shown == text[: min(places)]
            return
        assert not places
        assert text.startswith(shown)
        assert not any(text[len(shown) :].startswith(stop) for stop in stops)
    assert shown + finder.end() == text


def test_names_join_to_the_text_and_bytes_to_its_bytes() -> None:
    text = "the cat 🙂 sat 日本 on the mat"
    for kind in KINDS:
        tokenizer = learn(text * 9, 300, kind)
        names, ids = TokenNames(tokenizer), tokenizer.encode(text).tolist()
        if kind in ("byte_pair", "unigram"):
            assert b"".join(bytes(names.bytes(token) or ()) for token in ids).decode().strip() == text
        assert len({names.unique(token) for token in ids}) == len(set(ids))
