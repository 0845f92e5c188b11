"""The verbs of the command line: what each one does, which options it reads, and how it is started."""
