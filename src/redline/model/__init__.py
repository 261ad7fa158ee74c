"""What flows between the rooms: specs, records, messages, notes, units and errors."""
