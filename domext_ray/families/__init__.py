"""Kinds of tasks: what each reads, learns, predicts and is scored by."""
