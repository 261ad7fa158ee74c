"""The operating system and the drivers provide what is here: processes, locks and telemetry."""
