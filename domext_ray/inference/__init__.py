"""Fine-tuned models at work on new text."""
