"""Backfill: latency-critical and batch LLM requests on the same accelerators."""

from __future__ import annotations

# Not typing's: a Ctrl-C has no handler yet while this is imported (__main__.py), so it should not take long.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from backfill.core.errors import BackfillError, EngineDead, InvalidOption, InvalidRequest, RequestLost
    from backfill.core.sampling import RequestOutputKind, SamplingParams
    from backfill.core.slo import SLO
    from backfill.core.structured import StructuredOutputsParams
    from backfill.llm.async_llm import AsyncLLM
    from backfill.llm.llm import LLM
    from backfill.llm.offload import offload
    from backfill.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

    __version__: str

# Imported when they are first asked for: the engine's process and the command line need none of them.
_HOMES = {
    "AsyncLLM": "backfill.llm.async_llm",
    "BackfillError": "backfill.core.errors",
    "CompletionOutput": "backfill.llm.outputs",
    "EngineDead": "backfill.core.errors",
    "InvalidOption": "backfill.core.errors",
    "InvalidRequest": "backfill.core.errors",
    "LLM": "backfill.llm.llm",
    "Logprob": "backfill.llm.outputs",
    "RequestLost": "backfill.core.errors",
    "RequestMetrics": "backfill.llm.outputs",
    "RequestOutput": "backfill.llm.outputs",
    "RequestOutputKind": "backfill.core.sampling",
    "SLO": "backfill.core.slo",
    "SamplingParams": "backfill.core.sampling",
    "StructuredOutputsParams": "backfill.core.structured",
    "offload": "backfill.llm.offload",
}

__all__ = [
    "LLM",
    "SLO",
    "AsyncLLM",
    "BackfillError",
    "CompletionOutput",
    "EngineDead",
    "InvalidOption",
    "InvalidRequest",
    "Logprob",
    "RequestLost",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "offload",
]


if not TYPE_CHECKING:  # checkers would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("backfill")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
