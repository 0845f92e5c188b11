"""Models are measured and compared: methods, sweeps, ablations, forgetting, retrieval."""
