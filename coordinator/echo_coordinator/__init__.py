"""The training side: leases work, judges and buffers trajectories, trains, publishes versions."""
