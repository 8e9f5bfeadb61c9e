"""Upper bounds of the histograms' buckets: seconds, tokens, ratios, counts."""

from __future__ import annotations

# vLLM's bounds, so that its dashboards can show our metrics. ITL starts lower: small models decode a token
# in less than 10 ms.
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS = (1, 8, *(16 << i for i in range(11)))
# Observed over predicted: narrow buckets near 1, where a good profile lies.
STEP_RATIO = (
    0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2, 4,
)  # fmt: skip
STOP_LATENCY_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20)
HTTP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LOOP_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


def request_tokens(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to ``max_model_len``, the most tokens of a request."""
    bounds, scale = [], 1
    while scale <= max_model_len:
        bounds += [scale * step for step in (1, 2, 5) if scale * step <= max_model_len]
        scale *= 10
    return tuple(bounds)
