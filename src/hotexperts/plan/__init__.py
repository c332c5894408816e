"""What a model would need of a machine, and how fast it would run, before anything is loaded."""
