"""What notebooks and the command line call: one file per verb, the function beside its result."""
