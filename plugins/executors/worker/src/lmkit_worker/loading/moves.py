"""The order in which a weight rule puts the outputs of a module, found by sending numbers through its transform.

An adapter's B has the outputs in the order of the file, so it has to be put in the same order as the weight. Only a few
inputs are tried, since weights may be larger than memory allows to copy as numbers: a transform that works for any
number of inputs, and leaves them in place, treats all alike. Others are tried with all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Layout = tuple[int | None, ...]  # sizes of the axes with outputs (or experts and outputs); None: the inputs
WIDTHS = (2, 3, 5)  # numbers of inputs to try
MAX_NUMBERS = 1 << 27  # that are sent through a transform at once


def layouts(num_outputs: int, experts: int = 0) -> tuple[Layout, ...]:
    """The ways in which a file may store a weight, or a stack of them; in some of them inputs come first."""
    if not experts:
        return (num_outputs, None), (None, num_outputs)
    return (experts, num_outputs, None), (experts, None, num_outputs), (experts * num_outputs, None)


def stored_outputs(
    transform: Callable[[Tensor], Tensor] | None, options: Iterable[Layout], num_inputs: int
) -> list[int] | None:
    """Which stored output is each output of what the transform makes of the first layout that it takes.

    None where it takes none, or does more than put outputs in another order.
    """
    for layout in options:
        orders = [_order(transform, layout, width) for width in WIDTHS]
        if None in orders and math.prod(size or num_inputs for size in layout) <= MAX_NUMBERS:
            orders = [_order(transform, layout, num_inputs)]
        if orders[0] is not None and all(order == orders[0] for order in orders):
            return orders[0]
    return None


def _order(transform: Callable[[Tensor], Tensor] | None, layout: Layout, width: int) -> list[int] | None:
    """Which output comes where, with so many inputs; None where that is not all that happens."""
    import torch

    sizes = [1 if size is None else size for size in layout]
    num_outputs = math.prod(sizes)
    inputs = torch.arange(width).view([width if size is None else 1 for size in layout])
    numbers = torch.arange(num_outputs).view(sizes) * width + inputs
    try:
        moved = numbers if transform is None else transform(numbers)
    except Exception:  # it is a plugin's, and made for weights
        return None
    if tuple(moved.shape) != (num_outputs, width):
        return None
    outputs, column = moved.div(width, rounding_mode="floor"), moved % width
    if not torch.equal(column, inputs.flatten().to(column).expand_as(column)):
        return None
    if not torch.equal(outputs, outputs[:, :1].expand_as(outputs)):
        return None
    order = outputs[:, 0].long()
    return order.tolist() if torch.equal(order.sort().values, torch.arange(num_outputs)) else None
