"""Child processes and messages to and from them."""
