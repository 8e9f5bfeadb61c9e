"""A child process and the messages to and from it."""
