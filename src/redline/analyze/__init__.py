"""These are pure functions of records: statistics, trust, what limits a run, and the row a table prints.

Called by `verbs/`, whose results are made of them, and by the stop rules of `search/`. Nothing here measures or prints.
"""
