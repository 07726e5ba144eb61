"""Prompts and rewards out of child processes: `pool` is what the coordinator uses, `worker` is what runs inside."""
