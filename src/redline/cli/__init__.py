"""This is the command line: the options and the display of the commands. `verb.py` makes each from its verb and prints the result.

The only printer and the only caller of exit.
"""
