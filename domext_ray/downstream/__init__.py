"""A checkpoint is measured: tasks, fine-tuning, features, forgetting, ablations."""
