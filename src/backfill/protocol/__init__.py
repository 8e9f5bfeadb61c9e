"""OpenAI's requests and responses and the service behind them, without HTTP."""
