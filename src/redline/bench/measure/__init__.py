"""Steady state, timed blocks, telemetry."""
