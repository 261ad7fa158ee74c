"""Capture with torch.profiler; nothing here analyses."""
