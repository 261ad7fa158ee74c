"""Plain PyTorch that switches apply and snippets contain, unchanged.

Nothing here knows of Redline. Every function or class works by itself, given the imports that its switch names and the
other functions of this folder that its switch copies along with it.
"""
