"""What a base can be extended by: one file per kind, and one table that everything else asks."""
