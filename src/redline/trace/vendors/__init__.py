"""Other people's profilers, one file for each maker: how to put one in front of a worker, and how to read what it wrote.

Nothing here runs anything. `nsys` and the four of ROCm were written from documentation and recorded files and never run;
`docs/hardware.md` says what was tested on which hardware.
"""
