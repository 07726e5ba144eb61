"""The inference peer: pulls signed model versions, samples completions, pushes trajectories."""
