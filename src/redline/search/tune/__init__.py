"""`redline tune`: the search for the fastest recipe.

Called by `redline.api.tune`, which makes a `Tuner` (the state) and hands it to `search` in `loop.py`, the main path:

    explore   planner.py says what to try next, from space.py (all recipes), safe.py (what an engineer would begin with) and
              beliefs.py (what is believed about recipes that were not tried); trials.py prepares and times it; inquiry.py finds
              out why one failed, lessons.py what that rules out; estimates.py tells what those took that were timed
    decide    finals.py races the last few, in processes that final_runs.py opens; reserve.py keeps time for that, costs.py says what things take
    ablate    ablation.py: the winner without one switch at a time; batches.py chooses its batch, checks.py runs the user's check

winner.py draws the conclusion from the records, result.py is all that is said about it, record.py is what is kept.
"""
