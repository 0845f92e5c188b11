"""Trials of an experiment: what all commands that train several models run them with."""
