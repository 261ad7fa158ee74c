"""The bench is the only code that imports torch. It runs in a worker that may fail without harm to the desk.

The desk reaches it through a door: `worker.py` reads the messages of `redline.model.protocol`, `session.py` answers them. What runs it in the
same process (the inline door, `compat/` and `redline.watch()`) is listed in the import contracts of `pyproject.toml`.
"""
