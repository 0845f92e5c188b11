"""Rows and a model become a checkpoint."""
