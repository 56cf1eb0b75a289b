"""Placement's policy, without I/O or a clock: times are arguments, decisions are values.

kvpr        facts about models, devices and groups; demand; pressure (KVPR)
window      token rates over 60 s, with a fast-rising short window beside it
field       the cluster as arrays
replication which models need a further group, and which have one more than they need
lifecycle/  which models are up: activation, eviction, reservations
assignment/ which model is on which group, and the moves that get there
"""
