"""The shared queue of a group, carried out: requests come from gateways, the policy orders them, engines run them."""
