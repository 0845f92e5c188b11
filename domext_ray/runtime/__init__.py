"""The process that a job is: signals, noise, Ray."""
