"""A bank of adapters behind one address: mixed batches, limits, a page."""
