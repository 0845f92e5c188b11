"""What a model has forgotten of the general language."""
