"""Labelled files become examples."""
