"""A checkpoint is fine-tuned on a labelled set, scored and exported."""
