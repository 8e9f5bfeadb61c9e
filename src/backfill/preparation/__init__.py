"""Request bodies and batch files to token ids, in a process of their own."""
