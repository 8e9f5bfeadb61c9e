"""KV memory: blocks, who owns them, and their layout."""
