"""The options of every job, and how a preset, a file and a command line set them."""
