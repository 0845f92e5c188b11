"""From a request to a trained, reported and exported run."""
