"""These loops ask the bench for more measurements: they decide what is measured next, and when it is enough.

`verbs/` calls them with a door, a journal and an observer. What comes out are records; `analyze/` draws the conclusions.
"""
