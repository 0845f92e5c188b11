"""A user's model is recognised and loaded; many adapters over one base are kept in a bank."""
