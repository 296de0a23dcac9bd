"""One changed op node as text: in one line where its op and its names stay, else both its lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

from torch.fx import Node

from rewright.ir.diff import Change
from rewright.ir.graph import kind_of, name_of, operands_of
from rewright.ir.names import relative
from rewright.ir.printer import print_node

_FITS_ONE_LINE = {"types", "operands", "attrs"}


def change_lines(change: Change, heading: str) -> Iterator[str]:
    """A change of an op node under a heading."""
    before, after = change.before, change.after
    if before is None:
        yield f"+ {print_node(change.node, heading)}"
    elif after is None:
        yield f"- {print_node(change.node, heading)}"
    elif {a.name for a in change.aspects} <= _FITS_ONE_LINE:
        types = _types(before, after)
        lead = types[0][0] if types else change.name
        said = [text if name == lead else f"%{relative(name, heading)}: {text}" for name, text in types]
        said += [*_operands(before, after, heading), *_attrs(change)]
        yield f"~ %{relative(lead, heading)}: {'; '.join(said)}"
    else:
        yield f"~ %{relative(change.name, heading)}: {', '.join(a.name for a in change.aspects)}"
        # Under one heading, so that a moved node's two lines differ in what differs, not in every name.
        yield f"  - {print_node(before, heading)}"
        yield f"  + {print_node(after, heading)}"


def _types(before: Node, after: Node) -> list[tuple[str, str]]:
    """Results of another type, and what changed."""
    old, new = before.meta["types"], after.meta["types"]
    results = zip(after.meta["names"], old, new, strict=True)
    return [(name, f"{a} -> {b}") for name, a, b in results if a != b]


def _operands(before: Node, after: Node, heading: str) -> Iterator[str]:
    pairs = list(zip(operands_of(before), operands_of(after), strict=True))
    changed = [(a, b) for a, b in pairs if (a and name_of(a)) != (b and name_of(b))]
    swapped = [(a, b) for a, b in changed if a is not None and b is not None]
    gone = [a for a, b in changed if a is not None and b is None]
    new = [b for a, b in changed if a is None and b is not None]
    if swapped:
        now, once = (_values([pair[i] for pair in swapped], heading) for i in (1, 0))
        yield f"reads {now} instead of {once}"
    if gone:
        yield f"no longer reads {_values(gone, heading)}"
    if new:
        yield f"also reads {_values(new, heading)}"


def _values(values: list[Node], heading: str) -> str:
    return ", ".join(dict.fromkeys(_value(v, heading) for v in values))


def _value(value: Node, heading: str) -> str:
    """As `print_node` prints an operand."""
    kind = kind_of(value)
    if kind in ("input", "state") and heading:
        return f"%.{name_of(value)}"
    return f"{'@' if kind in ('weight', 'constant') else '%'}{relative(name_of(value), heading)}"


def _attrs(change: Change) -> Iterator[str]:
    for aspect in change.aspects:
        if aspect.name == "attrs":
            for name in sorted(aspect.before.keys() | aspect.after.keys()):
                old, new = (json.dumps(side.get(name)) for side in (aspect.before, aspect.after))
                yield f"{name} {old} -> {new}"
