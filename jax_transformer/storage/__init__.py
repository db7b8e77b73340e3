"""How files and folders are read and written: bounded, whole or not at all; any room may use it."""
