from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.errors import CorruptModel, RequestError
from backfill.generation.detokenizer import IncrementalDetokenizer, StopStrings
from backfill.generation.tokenizer import Tokenizer
from tests.shared import examples


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(default_model)


def detokenize(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@settings(max_examples=examples(60), deadline=None)
@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40), prompt=st.text(max_size=10)
)
def test_the_texts_join_to_the_whole_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(detokenize(tokenizer, ids, tokenizer.encode(prompt))) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_appears_when_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🧵")
    assert len(ids) > 1
    texts = detokenize(tokenizer, ids, [])
    assert texts == [""] * (len(ids) - 1) + ["🧵", ""]


def test_an_incomplete_character_becomes_a_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🧵")[:-1]
    assert "".join(detokenize(tokenizer, ids, [])).rstrip("\ufffd") == "a"


@settings(max_examples=examples(60), deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens_can_be_detokenized(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenize(tokenizer, ids, [])


def test_special_tokens_are_hidden_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), 2]
    shown = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
    assert "".join(map(shown.push, ids)) == "hi<|im_end|>"
    hidden = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    assert "".join(map(hidden.push, ids)) + hidden.flush() == "hi"


def test_token_bytes_are_exact(tokenizer: Tokenizer) -> None:
    for text in ("a🧵b é\n", " the", "12"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_chat_is_rendered_by_the_models_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    continued = tokenizer.render_chat(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}],
        continue_final_message=True,
    )
    assert continued.endswith("<|im_start|>assistant\nHel")


def test_a_template_that_refuses_is_the_clients_error(default_model: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer.from_folder(default_model, chat_template=template).render_chat(
            [{"role": "user", "content": "hi"}]
        )


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptModel, match="tokenizer"):
        Tokenizer.from_folder(tmp_path)


def feed(stops: StopStrings, texts: list[str]) -> tuple[str, str | None]:
    shown = ""
    for each in texts:
        text, found = stops.push(each)
        shown += text
        if found is not None:
            return shown, found
    return shown + stops.flush(), None


@pytest.mark.parametrize(
    ("texts", "stops", "include", "expected"),
    [
        (["hello"], [], False, ("hello", None)),
        (["he", "llo wor", "ld!"], ["world"], False, ("hello ", "world")),
        (["he", "llo wor", "ld!"], ["world"], True, ("hello world", "world")),
        (["a", "b", "a", "b", "c"], ["abc"], False, ("ab", "abc")),
        (["wor"], ["world"], False, ("wor", None)),
        (["xaby"], ["b", "ab"], False, ("x", "ab")),
        (["stop"], ["s"], False, ("", "s")),
    ],
)
def test_stop_strings(
    texts: list[str], stops: list[str], include: bool, expected: tuple[str, str | None]
) -> None:
    assert feed(StopStrings(stops, include_in_output=include), texts) == expected


@given(
    text=st.text(alphabet="ab", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stop=st.text(alphabet="ab", min_size=1, max_size=4),
)
def test_where_text_is_cut_does_not_matter(text: str, cuts: list[int], stop: str) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    texts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    found = text.find(stop)
    expected = (text, None) if found < 0 else (text[:found], stop)
    assert feed(StopStrings([stop], include_in_output=False), texts) == expected
