"""What KV connectors are made of: a store of frames, and all that keeps an engine safe from it."""

from lmkit_stores.connector import Store, StoreConnector
from lmkit_stores.fingerprint import fingerprint
from lmkit_stores.folder import Folder
from lmkit_stores.frames import name_of, opened, sealed
from lmkit_stores.memory import Memory
from lmkit_stores.options import StoreOptions

__all__ = ["Folder", "Memory", "Store", "StoreConnector", "StoreOptions", "fingerprint", "name_of", "opened", "sealed"]
