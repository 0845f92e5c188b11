"""Banks of adapters: many domains on one base, kept, served and chosen."""
