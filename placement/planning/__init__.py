"""Puts the cluster before the policy, and turns the policy's answers into plans that can be carried out."""
