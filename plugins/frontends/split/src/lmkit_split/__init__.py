"""One address for engines that compute prompts and engines that write answers."""
