"""OpenAI's API: bodies that are checked, and the endpoints for text, chats, embeddings and scores."""
