"""OpenAI's request and response shapes and the service behind them, without HTTP."""
