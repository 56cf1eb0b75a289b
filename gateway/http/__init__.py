"""HTTP itself: the application and its server, connections, messages, streams of events, paths, /openapi.json."""
