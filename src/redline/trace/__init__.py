"""This package holds traces as numpy columns, and reads kernels, operators, timeline, gaps and phases off them. It does not use torch.

`redline.analyze.profile` puts the tables together and draws the conclusions.
"""
