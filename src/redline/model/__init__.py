"""The rooms exchange what is defined here: specs, records, messages, notes, units and errors."""
