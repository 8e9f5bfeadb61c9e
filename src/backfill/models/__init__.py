"""Decoder-only architectures, and where their weights come from."""
