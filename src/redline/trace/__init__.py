"""Traces as numpy columns, and what can be read off them: kernels, operators, timeline, gaps, phases. No torch here.

`redline.analyze.profile` puts the tables together and draws the conclusions.
"""
