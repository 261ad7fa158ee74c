"""FLOPs and bytes, per operator and per module, without running the model."""
