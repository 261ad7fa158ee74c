"""`tune`: the record of a search, the space, the loop, the finals and what came of it."""
