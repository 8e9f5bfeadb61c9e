"""The library: ``LLM`` for scripts and notebooks, ``AsyncLLM`` for asyncio programs."""
