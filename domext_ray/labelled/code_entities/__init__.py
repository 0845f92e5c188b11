"""The labelled set that ships, and the set that a configuration names."""
