"""Who may ask for what: API keys, their quotas, and pages of other origins (CORS)."""
