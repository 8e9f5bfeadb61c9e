"""Text in, text out: tokens to text and back, stop strings, one request's stream of text."""
