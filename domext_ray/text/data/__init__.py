"""Files that a user names become rows: each with its place, its fields or what is wrong with it."""
