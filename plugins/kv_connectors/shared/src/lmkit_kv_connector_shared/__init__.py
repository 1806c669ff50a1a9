"""All blocks, in files of a folder that several engines share."""
