"""BROS's evaluation."""
