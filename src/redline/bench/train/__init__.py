"""Training on data: from a spec to epochs, and loader and model measured apart and together."""
