from __future__ import annotations

import json
from typing import cast

import pytest

from backfill.core.plan import TokenLogprobs
from backfill.core.request import FinishReason
from backfill.generation.generator import TextDelta
from backfill.generation.tokenizer import Tokenizer
from backfill.protocol.encoding import EncodedBody
from backfill.protocol.responses import (
    ChatShape,
    CompletionShape,
    Response,
)
from tests.protocol.builders import make_generation

GENERATION = make_generation()


class LetterTokenizer:
    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


TOKENIZER = cast(Tokenizer, LetterTokenizer())


def whole(shape: ChatShape | CompletionShape, text: str, *, with_logprobs: bool) -> dict[str, object]:
    response = Response(GENERATION, shape)
    for letter in text:
        logprobs = TokenLogprobs(-0.5, ((ord(letter), -0.5), (0, -2.25))) if with_logprobs else None
        response.add(0, TextDelta(letter, ord(letter), logprobs, FinishReason.STOP))
    body = json.loads(bytes(EncodedBody(response.whole())))
    (choice,) = body["choices"]
    result: dict[str, object] = choice["logprobs"]
    return result


def test_a_whole_chat_body_has_the_logprobs_of_every_token() -> None:
    def entry(letter: str, logprob: float) -> dict[str, object]:
        return {"token": letter, "logprob": logprob, "bytes": list(letter.encode())}

    content = [{**entry(c, -0.5), "top_logprobs": [entry(c, -0.5), entry("\0", -2.25)]} for c in 'a"é']
    assert whole(ChatShape(TOKENIZER), 'a"é', with_logprobs=True) == {"content": content}


def test_a_whole_completion_body_has_the_logprobs_of_every_token() -> None:
    assert whole(CompletionShape(TOKENIZER), 'a"é', with_logprobs=True) == {
        "tokens": ["a", '"', "é"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{c: -0.5, "\0": -2.25} for c in 'a"é'],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("shape", [ChatShape(TOKENIZER), CompletionShape(TOKENIZER)])
def test_logprobs_that_nobody_asked_for_are_null(shape: ChatShape | CompletionShape) -> None:
    assert whole(shape, "ab", with_logprobs=False) is None
