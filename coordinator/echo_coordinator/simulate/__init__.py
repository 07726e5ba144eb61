"""A run without machines: the coordinator's real state and service, modelled nodes, and time that jumps.

    scenario ─► world ─┬─ site: RunState, WorkService, feeding, scoring, audits (all real) and a modelled trainer
                       ├─ network: delay, loss, duplicates, partitions
                       ├─ nodes: the node's real lease book; modelled sampling, fetching, outbox; some lie
                       └─ watch: what must hold at every step

docs/adr has the record on what is real in it and what is not.
"""
