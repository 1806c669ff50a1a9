"""What the parts of lmkit say to each other: errors, configuration, parameters, plans, and the protocols of seams.

Plugins find all of this in `lmkit.api`. Nothing here imports another part, nor torch or numpy.
"""
