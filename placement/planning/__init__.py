"""The cluster put before the policy, and its answers as plans that can be carried out."""
