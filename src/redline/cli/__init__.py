"""The command line: arguments to specs. The only printer and the only caller of exit."""
