"""The augmented model: the six files that exports carry along."""
