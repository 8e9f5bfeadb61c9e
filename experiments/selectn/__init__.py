"""Select-N's evaluation."""
