"""FLOPs and bytes, per operator and per module, without running the model.

Called by `prepare.py` for every measured step, and by `session.py` for `redline flops`.
"""
