"""docs/PROTOCOL.md shows the table of phases as it is."""

from __future__ import annotations

from pathlib import Path

from everstep.orchestrator.core.model import diagram

PAGE = Path(__file__).resolve().parents[2] / "docs" / "PROTOCOL.md"


def test_the_drawn_phases_are_those_of_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in PAGE.read_text(encoding="utf-8")
