"""All blocks, in a Redis or Valkey server."""
