"""Models at work: text comes in, predictions go out."""
