"""The state of a run: groups, leases, intake, replay buffer, ledger, who takes part. `run_state` puts it together."""
