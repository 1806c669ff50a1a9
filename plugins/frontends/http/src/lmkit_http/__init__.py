"""The HTTP server: dialects as projections of one event stream. No torch."""
