"""Options: declaring them, and how a preset, a YAML file and flags become a checked configuration."""
