"""The trainer: one child process (1..N ranks) that turns a batch of trajectories into the next policy version.

    coordinator ──batch file──► process (rank 0 on a unix socket, the others through torch.distributed)
                                   │ engine.Trainer.train(batch)
                                   │   advantage → rows → packing → logprobs → objective → optimizer
                                   ▼
    coordinator ◄──trained──── checkpoint folder v00000013/ (weights, optimizer, state), durable and re-read

Importing `settings`, `batch`, `advantage`, `rows`, `metrics`, `state` and `client` needs no torch.
"""
