"""Models in GGUF files: their folders, and their weights as they are stored."""
