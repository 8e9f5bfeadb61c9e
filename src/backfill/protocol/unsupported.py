"""Fields of OpenAI's and vLLM's APIs that this server does not implement."""

from __future__ import annotations

from typing import NoReturn

from backfill.core.errors import RequestError

# They would change the answer, so a request that sets one is refused.
UNSUPPORTED_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "documents",
        "echo",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logits_processors",
        "modalities",
        "moderation",
        "prediction",
        "prompt_embeds",
        "prompt_logprobs",
        "reasoning_effort",
        "return_tokens_as_token_ids",
        "structural_tag",
        "structured_outputs",
        "suffix",
        "tools",
        "use_beam_search",
        "web_search_options",
    }
)

# They would not change the answer: accepted without a warning.
IGNORED_FIELDS = frozenset(
    {
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "include_reasoning",
        "kv_transfer_params",
        "length_penalty",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "tool_choice",
        "verbosity",
        "vllm_xargs",
    }
)
IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation"})


def refuse_unsupported(name: str) -> NoReturn:
    """Raise RequestError for a field that is not implemented."""
    raise RequestError(f"{name} is not supported by this server.", param=name, code="unsupported_parameter")
