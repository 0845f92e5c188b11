"""Text becomes rows of tokens."""
