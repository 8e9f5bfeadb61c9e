"""Tokenizer, chat templates, detokenizer and stop strings: a request's stream of text."""
