"""Plain PyTorch that a step applies and a snippet carries, word for word.

Nothing here knows of Redline, and every function or class stands by itself but for the imports that its step names
and the others of this room that its step carries with it.
"""
