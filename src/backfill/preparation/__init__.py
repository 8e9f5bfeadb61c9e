"""A process that turns request bodies and batch files into token ids."""
