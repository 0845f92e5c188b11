"""Several methods side by side."""
