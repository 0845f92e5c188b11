"""Files, folders, hub datasets and installed packages become documents."""
