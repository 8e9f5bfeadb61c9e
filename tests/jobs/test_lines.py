from __future__ import annotations

import json

from backfill.jobs.lines import completed
from backfill.jobs.records import TokenUsage
from backfill.preparation.lines import BatchLine
from backfill.protocol.encoding import EncodedList


def test_a_result_line_holds_a_body_whose_lists_are_encoded() -> None:
    content = EncodedList()
    for token in ("a", "b"):
        content.extend([{"token": token}])
    body = {
        "choices": [{"index": 0, "logprobs": {"content": content}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    result = completed(BatchLine(number=1, custom_id="c"), body)
    assert result.usage == TokenUsage(3, 1, 2)
    encoded = result.encode("id")
    assert encoded.endswith(b"}\n")
    assert json.loads(encoded)["response"]["body"] == {
        **body,
        "choices": [{"index": 0, "logprobs": {"content": [{"token": "a"}, {"token": "b"}]}}],
    }
