"""A checkpoint is measured: tasks, fine-tuning, forgetting, ablations."""
