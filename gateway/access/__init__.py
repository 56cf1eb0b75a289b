"""Who may use what: API keys, their quotas, and pages of other origins (CORS)."""
