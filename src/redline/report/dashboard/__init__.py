"""The dashboard: records to a payload of plain columns, the payload and a template to one HTML file."""
