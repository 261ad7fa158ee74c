"""Data to train on: what there is, how it is loaded, and how it reaches the device.

Called by `prepare.py` and `train/` of the bench, for `redline train`, `loader` and `ladder`.
"""
