"""What the drivers and the system say about GPUs and the CPU, read without torch."""
