"""The demo: a small model made on the spot, a recipe that trains it, and the swarm on loopback that does so."""
