"""Pure functions of records: statistics, trust, what limits a run, and the row a table prints."""
