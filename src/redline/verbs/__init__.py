"""One file a verb: what it takes, what it does and what it shows."""
