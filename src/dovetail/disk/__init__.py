"""Files: read as untrusted input, with bounds; written whole or not at all. No model and no spec."""
