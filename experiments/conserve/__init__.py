"""ConServe's evaluation."""
