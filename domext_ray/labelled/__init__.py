"""Labelled sets: files become examples, and predictions are scored against them."""
