"""KV blocks from engine to engine over TCP."""
