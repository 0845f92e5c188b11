"""A run's directory: its identity, its lock, its files and events."""
