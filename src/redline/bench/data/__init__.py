"""This package holds the data to train on: which sources there are, how they are loaded, and how they reach the device.

`prepare.py` and `train/` of the bench call it, for `redline train`, `loader` and `ladder`.
"""
