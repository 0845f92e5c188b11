"""A space of configurations is searched for downstream F1."""
