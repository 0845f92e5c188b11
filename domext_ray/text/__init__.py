"""Text of a user's own becomes documents, words, rows of tokens and batches in a fixed order."""
