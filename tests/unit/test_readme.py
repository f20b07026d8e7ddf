"""The README's promises that can be checked without a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import everstep

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_python_blocks_compile() -> None:
    assert blocks("python")
    for block in blocks("python"):
        compile(block, "README.md", "exec")


def test_yaml_blocks_are_valid_configurations() -> None:
    assert blocks("yaml")
    for block in blocks("yaml"):
        assert everstep.RunConfig.from_yaml(block).scaling.max_replicas == 8


def test_linked_files_and_make_targets_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)\b", README, re.M)):
        assert f"\n{target}:" in makefile, target
