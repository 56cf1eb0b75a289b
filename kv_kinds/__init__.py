"""KV as a list of kinds: those that a model keeps for its requests, and the bytes of each device that they take.

    layout    the kinds of a model, and the bytes that a request needs of them; pure
    messages  kinds in the messages of the services
    wording   kinds as people read them

Loader, groups, placement, simulator and commands all count with these layouts. docs/design/kv_kinds.md explains kinds,
and how a request's need is computed.
"""
