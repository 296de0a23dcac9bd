"""A failed pass in one file: the graph before it, the passes from it on, the facts, the versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from rewright.ir.errors import BadInput
from rewright.ir.graph import IR_VERSION, Graph
from rewright.ir.parser import parse
from rewright.ir.precision_plan import Precision
from rewright.ir.printer import print_graph
from rewright.ir.static_scales import parse_static_scales
from rewright.ir.types import parse_type
from rewright.passes.facts import Facts, FoldWo

FORMAT = "rewright.reproducer"


@dataclass(frozen=True)
class Reproducer:
    """What it takes to run a pass again.

    Attributes:
        text: text of the graph before the pass.
        facts: what the passes knew.
        passes: names of the passes from the failed one on.
        done: names of those before it.
        verify: whether regions were run before and after.
        versions: of Python, torch and the graph language.
    """

    text: str
    facts: Facts
    passes: tuple[str, ...]
    done: tuple[str, ...]
    verify: bool
    versions: Mapping[str, Any]

    @classmethod
    def of(
        cls, graph: Graph, facts: Facts, passes: tuple[str, ...], done: tuple[str, ...], verify: bool
    ) -> Reproducer:
        """A reproducer of passes over a graph, made here and now."""
        versions = {"ir": IR_VERSION, "python": platform.python_version(), "torch": torch.__version__}
        return cls(print_graph(graph), facts, passes, done, verify, versions)

    def graph(self) -> Graph:
        """The graph before the pass."""
        return parse(self.text, "the reproducer's graph")

    def to_text(self) -> str:
        """The file."""
        scales = self.facts.static_scales
        value = {
            "format": FORMAT,
            "versions": dict(self.versions),
            "passes": list(self.passes),
            "done": list(self.done),
            "verify": self.verify,
            "facts": {
                "model": dict(self.facts.model),
                "numerics": self.facts.numerics,
                "fold_wo": self.facts.fold_wo,
                "static_scales": scales.to_json() if scales is not None else None,
                "precision": self.facts.precision.to_json(),
                "weights": {name: str(t) for name, t in sorted(self.facts.weights.items())},
            },
            "graph": self.text.splitlines(),
        }
        return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def read_reproducer(path: Path) -> Reproducer:
    """Read a file that a failed pass left; `BadInput` if it is something else."""
    try:
        value = json.loads(path.read_text())
        facts = value["facts"]
        scales = facts["static_scales"]
        if value["format"] != FORMAT or facts["fold_wo"] not in get_args(FoldWo):
            raise ValueError
        return Reproducer(
            text="\n".join(value["graph"]) + "\n",
            facts=Facts(
                model=dict(facts["model"]),
                numerics=facts["numerics"],
                weights={name: parse_type(text) for name, text in facts["weights"].items()},
                fold_wo=facts["fold_wo"],
                static_scales=None if scales is None else parse_static_scales(scales),
                precision=Precision.from_json(facts["precision"]),
            ),
            passes=tuple(value["passes"]),
            done=tuple(value["done"]),
            verify=bool(value["verify"]),
            versions=dict(value["versions"]),
        )
    except OSError as e:
        raise BadInput(f"cannot be read ({e.strerror})", where=str(path), fix="check the path") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BadInput(
            "is no reproducer", where=str(path), fix="name a file that a failed pass has written"
        ) from e
