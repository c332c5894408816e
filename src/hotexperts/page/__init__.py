"""Reports as one HTML page of their own: text and drawings, no script, nothing from a network."""
