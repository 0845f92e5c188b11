"""What a fine-tuned model loses without each span of layers."""
