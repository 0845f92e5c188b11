"""Which words the base has, which ones the domain adds, and how those begin."""
