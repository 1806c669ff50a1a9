"""What test_killable.py runs in a process of its own."""

import os
import sys
import time

from lmkit_killable import serve

kept = []


def handle(payload: bytes) -> bytes:
    word = payload[:9].strip()
    if word == b"spin":
        while True:
            pass
    if word == b"power":  # one call, without a step of the interpreter
        return b"%d" % len(str(7 ** (10**8)))
    if word == b"eat":
        return bytes(1 << 40)
    if word == b"keep":
        kept.append(b"\1" * (300 << 20))
        return b"%d" % os.getpid()
    if word == b"sleep":
        time.sleep(60)
    if word == b"die":
        os._exit(3)
    if word == b"print":
        print("noise")
        os.write(1, b"noise")
        os.write(2, b"noise")
    if word == b"pid":
        return b"%d" % os.getpid()
    return payload[::-1]


if __name__ == "__main__":
    sys.exit(serve(handle, quiet=True))
