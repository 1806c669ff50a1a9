"""One way from a conversation or a text to events, and from events to a message. Every front door uses it.

ask.py      what is asked for: checked once, frozen
prepare.py  an ask becomes turns: what the engine is asked, and what reads its tokens
run.py      turns are played: in this thread, or on an event loop
message.py  events become changes of a message; a whole answer is what its changes add up to
"""
