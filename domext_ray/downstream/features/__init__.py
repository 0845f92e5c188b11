"""A frozen encoder's vectors, read by a small model."""
