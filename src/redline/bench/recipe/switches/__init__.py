"""One file per family of optimisation. Adding one is adding a file here."""
