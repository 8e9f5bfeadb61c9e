"""The load generator: a client of any OpenAI-compatible server that measures latency and throughput."""
