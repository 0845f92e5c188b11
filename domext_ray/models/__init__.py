"""The model and the head that fine-tuning begins with."""
