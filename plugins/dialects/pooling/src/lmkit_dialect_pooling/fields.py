"""Fields of the pooling routes that other servers know: what changes nothing here, and what to send instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit_http.strict import Refused

_PREFIX = "write the words that the model expects before a query or a document into the text"

DROPPABLE: Mapping[str, tuple[Any, ...]] = {
    "user": (), "request_id": (), "cache_salt": (), "mm_processor_kwargs": (), "media_io_kwargs": (), "metadata": (),
    "truncation_side": ("right",), "truncation_direction": ("Right", "right"), "use_fp16": (), "rid": (),
    "chat_template_kwargs": (),
}  # fmt: skip

# fields whose absence would change the vectors or scores
REFUSED: Mapping[str, Refused] = {
    "prompt_name": Refused(_PREFIX), "prompt": Refused(_PREFIX), "instruction": Refused(_PREFIX),
    "input_type": Refused(_PREFIX), "embedding_type": Refused("send encoding_format", ("float",)),
    "embedding_types": Refused("send encoding_format", (["float"],)),
    "output_dtype": Refused("send embed_dtype", ("float",)),
    "late_chunking": Refused("send each chunk by itself"),
    "chat_template": Refused("start the server with --chat-template FILE"),
    "softmax": Refused("send use_activation"), "multi_vector": Refused("use /pooling with the task token_embed"),
}  # fmt: skip
