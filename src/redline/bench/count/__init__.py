"""This room counts FLOPs and bytes, per operator and per module, without running the model where that is possible.

`prepare.py` calls it for every measured step, and `session.py` for `redline flops`.
"""
