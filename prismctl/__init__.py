"""The operator's command: shows what is where and why, and has a few commands that change it. Every view has a --json
form for scripts."""
