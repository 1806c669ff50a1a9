"""Intake, step loop, process shell, client, supervisor."""
