"""The bench: the only code that imports torch. It runs in a worker that may break without taking the desk along."""
