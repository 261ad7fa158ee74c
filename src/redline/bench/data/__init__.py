"""Data to train on: what there is, how it is loaded, and how it reaches the device."""
