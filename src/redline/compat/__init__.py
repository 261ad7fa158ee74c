"""These are command lines of other tools on top of the same bench."""
