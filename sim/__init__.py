"""The simulator: one deterministic world in virtual time that runs the cores that serve."""
