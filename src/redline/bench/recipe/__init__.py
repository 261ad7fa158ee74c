"""This room has the recipes: sets of optimisations, how they compose, and whether the numbers stay right."""
