"""Routing of requests: routes, links to groups, activation of models, and the relay that keeps a request going."""
