"""A model's vectors of texts are measured: which documents they find for a query."""
