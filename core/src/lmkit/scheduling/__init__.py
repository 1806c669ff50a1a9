"""Decisions, without torch: blocks, prefix hashes, tables, plan, scheduler, stop rules."""
