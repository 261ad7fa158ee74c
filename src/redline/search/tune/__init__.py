"""This package has `redline tune`, the search for the fastest recipe.

One rule decides what is started (`choose.py`), namely

    the recipe with the highest expected gain per second whose expected end, with its spread, plus the last race still fits before
    the deadline

`space.py` has all recipes, `beliefs.py` says what they promise, `costs.py` what they take, `lessons.py` what failures teach.
`trials.py` prepares and times them, `race.py` races the last few and takes the winner apart. `state.py` is the search
while it runs, and `loop.py` has its main path. `standings.py` and `summary.py` say what was found, `record.py` is what is kept.
"""
