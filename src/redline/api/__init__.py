"""What notebooks and the command line call: one file per verb, the function beside its result.

A result has `report()` (what a terminal shows), `to_json()` (what `--json` prints) and the records that it rests on.
"""
