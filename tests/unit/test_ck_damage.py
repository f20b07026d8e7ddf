"""Whatever happened to the bytes of a checkpoint, or whoever wrote its manifest: it is found, by name, without harm."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from everstep.checkpoint import strict_json
from everstep.checkpoint.catalog import newest_whole, open_checkpoint
from everstep.checkpoint.errors import CheckpointDamaged
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.reader import read_tensors
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.tree import Json, unflatten
from tests.unit.ck_helpers import NO_WAIT, save

TINY = {"a": {"w": torch.arange(10, dtype=torch.int16), "s": torch.tensor(1.5), "e": torch.empty(0, 2)}}


def read_all(store: Store, step: int) -> Any:
    manifest = open_checkpoint(store, step)
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    read_tensors(store, manifest, buffers)
    return unflatten(manifest.skeleton, buffers)


def tiny(url: str) -> tuple[Store, dict[str, bytes]]:
    store = open_store(url, retry=NO_WAIT)
    store.delete([info.key for info in store.listing("")])
    save(store, TINY, 5, world_size=1, chunk_bytes=16)
    objects = {info.key: store.get(info.key, 1 << 20) for info in store.listing("")}
    del objects["LATEST"]
    assert len(objects) == 3
    return store, objects


def test_every_flipped_byte_is_found() -> None:
    store, objects = tiny("memory://flips")
    for key, whole in objects.items():
        for place in range(len(whole)):
            # The lowest bit, the case of a letter, or all bits: some keep JSON what it is.
            mask = (0x01, 0x20, 0xFF)[place % 3]
            store.put(key, whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            with pytest.raises(CheckpointDamaged, match=r"steps/5|commits/5"):
                read_all(store, 5)
        store.put(key, whole)
    assert torch.equal(read_all(store, 5)["a"]["w"], TINY["a"]["w"])


def test_every_truncation_and_whatever_is_appended_is_found() -> None:
    store, objects = tiny("memory://cuts")
    for key, whole in objects.items():
        for damaged in [whole[:length] for length in range(len(whole))] + [whole + b" ", whole + whole]:
            store.put(key, damaged)
            with pytest.raises(CheckpointDamaged, match=r"steps/5|commits/5"):
                read_all(store, 5)
        store.delete([key])
        with pytest.raises(CheckpointDamaged, match=r"steps/5|commits/5"):
            read_all(store, 5)
        store.put(key, whole)


def test_objects_that_changed_places_are_found() -> None:
    store, objects = tiny("memory://places")
    save(store, {"a": {**TINY["a"], "s": torch.tensor(2.5)}}, 6, world_size=1, chunk_bytes=16)
    for key, whole in objects.items():
        other = key.replace("/5", "/6")
        store.put(key, store.get(other, 1 << 20))
        with pytest.raises(CheckpointDamaged):
            read_all(store, 5)
        store.put(key, whole)


def test_the_newest_whole_one_is_used_and_the_refusal_of_others_has_a_reason() -> None:
    store, _ = tiny("memory://choice")
    save(store, TINY, 6, world_size=1)
    save(store, TINY, 7, world_size=1)
    store.put("commits/7.json", b"{}")
    store.delete(["steps/6/i0-0/r0000.safetensors"])
    store.put("commits/x.json", b"foreign")
    choice = newest_whole(store)
    assert choice.manifest is not None and choice.manifest.step == 5
    assert [
        (refused.step, words in refused.reason)
        for refused, words in zip(choice.refused, ["commits/7", "is missing"], strict=True)
    ] == [(7, True), (6, True)]
    assert newest_whole(store, before=5).manifest is None


def valid() -> dict[str, Any]:
    store = open_store("memory://valid", retry=NO_WAIT)
    store.delete([info.key for info in store.listing("")])
    manifest = save(
        store, {**TINY, "b": [{"x": (1, 2.5, "t"), 3: torch.ones(4, 3).t()}]}, 5, world_size=2, chunk_bytes=16
    )
    raw: dict[str, Any] = json.loads(manifest.to_bytes())
    return raw


def refused(raw: Any, words: str) -> None:
    with pytest.raises(CheckpointDamaged, match=words) as caught:
        Manifest.parse(json.dumps(raw).encode(), "steps/5/i0-0/manifest.json")
    assert "steps/5/i0-0/manifest.json" in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "key",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "steps/5/../../x/r0000.safetensors",
        "steps/5/i0-0/../r0000.safetensors",
        "commits/5.json",
        "steps/5/i0-0/r0000.safetensors\n",
        "s3://b/steps/5/i0-0/r0000.safetensors",
        "",
        7,
        None,
        "steps/05/i0-0/r0000.safetensors",
        "steps/5/i00-0/r0000.safetensors",
        "steps/9/i0-0/r0000.safetensors",
    ],
)
def test_a_key_outside_the_parts_of_the_store_is_refused(key: Any) -> None:
    raw = valid()
    raw["objects"][0]["key"] = key
    refused(raw, "not the key of a part|later step")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 2, "upgrade everstep"),
        (("version",), True, "upgrade everstep"),
        (("format",), "zip", "not a manifest"),
        (("objects", 0, "size"), 1 << 60, "integer from"),
        (("objects", 0, "header_bytes"), 1 << 30, "header_bytes"),
        (("tensors", 0, "shape"), [1 << 52, 1 << 52], "at most"),
        (("tensors", 0, "shape"), [0, 1 << 52, 1 << 52], "at most|order"),
        (("tensors", 0, "shape"), [1] * 65, "at most 64"),
        (("tensors", 0, "dtype"), "object", "unknown dtype"),
        (("tensors", 0, "dtype"), "qint8", "unknown dtype"),
        (("tensors", 0, "order"), [0, 0], "order"),
        (("tensors", 0, "name"), "a.w", "one name"),
        (("chunks", 0, 4), 0, "offset"),
        (("chunks", 0, 4), 1 << 50, "offset"),
        (("chunks", 0, 0), -1, "tensor"),
        (("chunks", 0, 0), 1.0, "tensor"),
        (("chunks", 0, 3), 99, "object"),
        (("chunks", 0, 5), "X" * 32, "hexadecimal"),
        (("chunks", 0, 6), "", "hexadecimal"),
        (("created_s",), "now", "number"),
        (("step",), True, "step"),
        (("attempt",), "i1-0", "newer than"),
        (("user",), [], "user"),
        (("skeleton",), {"pickle": "x"}, "does not mention"),
        (("skeleton",), {"dict": []}, "does not mention"),
        (("skeleton",), {"tensor": 0}, "letters"),
        (("extra",), 1, "unknown"),
    ],
)
def test_a_manifest_with_one_wrong_value_is_refused_by_name(
    path: tuple[Any, ...], value: Any, words: str
) -> None:
    raw = valid()
    place = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value  # type: ignore[index]
    refused(raw, words)


def test_missing_and_overlapping_slices_are_refused() -> None:
    raw = valid()
    del raw["chunks"][1]
    refused(raw, "missing")
    raw = valid()
    raw["chunks"].insert(1, raw["chunks"][0])
    refused(raw, "overlap")
    raw = valid()
    raw["chunks"] = raw["chunks"][::-1]
    refused(raw, "not sorted")
    raw = valid()
    raw["chunks"][1][3:5] = raw["chunks"][0][3:5]
    refused(raw, "two chunks overlap")


def test_what_is_no_json_or_more_than_json_is_refused() -> None:
    text = json.dumps(valid())
    for raw in [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{" * 1000,
        text.encode()[:-1],
        b"1" * 5000,
        text.replace('"step": 5', '"step": 5, "step": 5').encode(),
        text.replace('"created_s": 1005.0', '"created_s": NaN').encode(),
        text.replace('"created_s": 1005.0', '"created_s": 1e999').encode(),
        text.replace('"user": {}', '"user": {"x": ' + "[" * 300 + "]" * 300 + "}").encode(),
    ]:
        assert raw != text.encode()
        with pytest.raises(CheckpointDamaged):
            Manifest.parse(raw, "m")


def test_no_value_of_a_skeleton_runs_code_or_takes_memory() -> None:
    for node in [
        {"scalar": ["O", "00" * 8]},
        {"scalar": [">M8", "00" * 8]},
        {"int": "f" * 100_000},
        {"bytes": "§"},
        {"dtype": "os"},
        {"dict": [[{"tensor": 0}, 1]]},
        {"dict": [[1, 1], [1, 1]]},
        {"tuple": {}},
        {"float": "00"},
    ]:
        raw = valid()
        raw["skeleton"]["dict"].append(["evil", node])
        refused(raw, "skeleton|tensor")


values: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


def places(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        found += places(inner, (*path, key))
    return found


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_mutated_manifest_is_refused_or_reads_without_harm(data: st.DataObject) -> None:
    store = open_store("memory://mutants", retry=NO_WAIT)
    if not store.listing("commits/"):
        save(
            store, {**TINY, "b": [{"x": (1, 2.5), 3: torch.ones(4, 3).t()}]}, 5, world_size=2, chunk_bytes=16
        )
    raw = json.loads(store.get("steps/5/i0-0/manifest.json", 1 << 20))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(raw)))
        place = raw
        for step in path[:-1]:
            place = place[step]
        kind = data.draw(st.sampled_from(["value", "near", "delete", "copy"]))
        old = place[path[-1]]
        if kind == "delete":
            del place[path[-1]]
        elif kind == "copy":
            other = raw
            for step in data.draw(st.sampled_from(places(raw))):
                other = other[step]
            place[path[-1]] = copy.deepcopy(other)
        elif kind == "near" and type(old) is int:
            place[path[-1]] = old + data.draw(st.sampled_from([-1, 1, 2, 16]))
        else:
            place[path[-1]] = data.draw(values)
        if not places(raw):
            break
    try:
        manifest = Manifest.parse(strict_json.dumps(raw), "m")
    except CheckpointDamaged:
        return
    assert manifest.total_bytes <= sum(held.size for held in manifest.objects)
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    try:
        read_tensors(store, manifest, buffers)
    except CheckpointDamaged:
        return
    unflatten(manifest.skeleton, buffers)
    assert Manifest.parse(manifest.to_bytes(), "m") == manifest


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
@example(b"null")
@example(b'{"format":"everstep-checkpoint"}')
def test_any_bytes_are_refused_as_damage(raw: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        Manifest.parse(raw, "m")
