"""Banks of adapters over one base: kept, served and chosen."""
