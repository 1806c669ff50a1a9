"""KV blocks from engine to engine by NIXL."""
