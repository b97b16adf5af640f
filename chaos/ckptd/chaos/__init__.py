"""The fault harness: runs a training script undisturbed and hurt, and compares what comes back bit by bit.

Rooms: `cluster` (nodes, agents, torchrun, the store), `nemesis` (what hurts), `scenario` and `schedule` (what hurts
when), `history` (what happened), `checkers` (pure: is it right), `conductor` (one run from start to end), `trial`
(undisturbed against hurt), `report` and `cli`. `matrix` hurts a small job at every boundary of the protocol.
It may import everything of ckptd; nothing imports it.
"""
