"""Task families: examples become inputs, outputs become answers."""
