"""Many engines behind one address: which replica a request goes to, and how it gets there. Nothing here imports Ray."""
