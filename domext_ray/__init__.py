"""Domain adaptation of BERT models: a frozen base, small extensions, Ray Train and DeepSpeed."""
