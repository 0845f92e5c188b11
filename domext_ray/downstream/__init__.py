"""A checkpoint is measured: labelled sets, tasks, fine-tuning, features, forgetting, ablations."""
