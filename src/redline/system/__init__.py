"""What the operating system and the drivers provide: processes, locks and telemetry."""
