"""The augmented model: the four files that exports carry along."""
