"""A run becomes a folder that other tools load."""
