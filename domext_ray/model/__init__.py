"""One augmented BERT."""
