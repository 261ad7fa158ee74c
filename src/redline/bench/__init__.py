"""The bench: the only code that imports torch. It runs in a worker that may fail without harm to the desk."""
