"""This package trains on data: it leads from a spec to epochs, and measures loader and model apart and together."""
