"""The command line: one file per command. It calls the function of the same name in `api/` and prints its result.

The only printer and the only caller of exit.
"""
