"""Anthropic's Messages API: its requests become chat requests, and answers its blocks."""
