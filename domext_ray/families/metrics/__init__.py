"""Figures of answers, with their intervals."""
