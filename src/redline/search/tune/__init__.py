"""`redline tune`: the search for the fastest recipe.

`state.py` is the search while it runs, `loop.py` its main path, and one rule (`choose.py`) decides what is started:

    the recipe with the highest expected gain per second whose expected end, with its spread, plus the last race still fits before
    the deadline

`space.py` has all recipes, `beliefs.py` what they promise, `costs.py` what they take, `lessons.py` what failures teach. `trials.py` prepares
and times them, `race.py` holds the last race, `finish.py` takes the winner apart, `result.py` says what was found, `record.py` is what is kept.
"""
