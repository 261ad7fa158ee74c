"""Other people's profilers, one file each: how to put one in front of a worker, and how to read what it wrote.

Nothing here runs anything. `nsys` and the four of ROCm were written from documentation and recorded files and have not
met the hardware; `docs/hardware.md` says what has.
"""
