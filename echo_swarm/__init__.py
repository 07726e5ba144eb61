"""Echo Swarm: what the coordinator and the nodes share. No torch, no command line, no environment reads."""

__version__ = "0.1.0"
