"""Layouts of bases: what a checkpoint of each architecture calls its parts, and how it comes back."""
