from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backfill.core.prefixes import CHUNK_BYTES, CHUNK_TOKENS, PrefixIndex, text_keys, token_keys


def test_keys_are_equal_up_to_the_first_difference() -> None:
    first = text_keys(b"a" * 4 * CHUNK_BYTES + b"end")
    second = text_keys(b"a" * 2 * CHUNK_BYTES + b"b" * 2 * CHUNK_BYTES)
    assert len(first) == len(second) == 4
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert not set(first) & set(text_keys(b"a" * 4 * CHUNK_BYTES, salt=b"another"))
    assert len(token_keys(tuple(range(3 * CHUNK_TOKENS - 1)))) == 2


def test_the_longest_prefix_of_each_replica_is_found() -> None:
    index = PrefixIndex()
    for name in ("a", "b", "c"):
        index.add(name, 100 * CHUNK_TOKENS)
    index.note_sent("a", [1, 2, 3])
    index.note_sent("b", [1, 2, 8, 9])
    assert index.match([1, 2, 3, 4], ["a", "b", "c"]) == {"a": 3, "b": 2, "c": 0}
    index.remove("a")
    assert index.match([1, 2, 3], ["b", "c"]) == {"b": 2, "c": 0}
    index.add("d", 100 * CHUNK_TOKENS)  # takes the place of the one that left, not what it held
    assert index.match([1, 2], ["d"]) == {"d": 0}


def test_the_end_of_what_was_sent_least_lately_is_forgotten_first() -> None:
    index = PrefixIndex()
    index.add("a", 4 * CHUNK_TOKENS)
    index.note_sent("a", [1, 2, 3])
    index.note_sent("a", [1, 7])
    index.note_sent("a", [8])
    assert index.match([1, 2, 3], ["a"]) == {"a": 2}
    assert index.match([1, 7], ["a"]) == {"a": 2}
    assert index.share_used("a") == 1.0


Chain = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda path: [hash(tuple(path[: end + 1])) for end in range(len(path))]
)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(Chain, st.none())), max_size=40))
def test_a_match_is_what_was_sent_and_memory_is_bounded(steps: list[tuple[str, list[int] | None]]) -> None:
    index, sent = PrefixIndex(), dict[str, set[int]]()
    for name, keys in steps:
        if keys is None:
            if name in sent:
                index.remove(name)
                del sent[name]
            continue
        if name not in sent:
            index.add(name, 5 * CHUNK_TOKENS)
            sent[name] = set()
        for other, num in index.match(keys, sent).items():
            assert set(keys[:num]) <= sent[other]
        index.note_sent(name, keys)
        sent[name].update(keys)
        assert index.share_used(name) <= 1.0
        assert index.match(keys, [name])[name] == min(len(keys), 5)
