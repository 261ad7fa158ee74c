"""Loops that ask the bench for more measurements: what is measured next, and when it is enough.

Called by `verbs/` with a door, a journal and an observer. What comes out are records; `analyze/` draws the conclusions.
"""
