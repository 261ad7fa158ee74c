"""This room takes the time: warm-up to a steady state, timed blocks with telemetry, ceilings, single operators.

`session.py` and `prepare.py` of the bench call it. Each block goes back to the desk as it is.
"""
