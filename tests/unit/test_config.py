"""Configs: what they refuse, in whose words, and that nothing is lost on the way through dicts and YAML."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import ConfigError
from everstep.orchestrator.config import (
    BatchConfig,
    CheckpointConfig,
    DetectionConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from everstep.orchestrator.settings import settings_of

YAML = """
name: gpt-2.small
seed: 7
scaling: {min_replicas: 2, max_replicas: 8, resources_per_replica: {CPU: 2, GPU: 0.5}}
batch: {global_batch_size: 64, logical_shards: 16, last_batch: partial}
failure: {non_finite: skip, process_crashes: null}
detection:
  heartbeat_s: 0.2
  driver_grace_s: null
env_vars: {OMP_NUM_THREADS: "1"}
"""


def config(**changes: Any) -> RunConfig:
    values = {
        "name": "run",
        "scaling": ScalingConfig(max_replicas=4),
        "batch": BatchConfig(global_batch_size=64, logical_shards=8),
    }
    return RunConfig(**{**values, **changes})


def test_yaml_text_and_file_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    from_text = RunConfig.from_yaml(YAML)
    assert RunConfig.from_yaml(tmp_path / "run.yaml") == from_text
    assert RunConfig.from_yaml(str(tmp_path / "run.yaml")) == from_text
    assert from_text.scaling.wished == 8
    assert from_text.batch.shard_size == 4
    assert from_text.failure.process_crashes is None
    assert from_text.detection.driver_grace_s is None


def test_nothing_is_lost_through_dict_and_pickle() -> None:
    made = RunConfig.from_yaml(YAML)
    assert RunConfig.from_dict(made.to_dict()) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, seed=8).seed == 8


def test_a_config_cannot_change_behind_its_checks() -> None:
    resources = {"CPU": 1.0}
    made = ScalingConfig(max_replicas=1, resources_per_replica=resources)
    resources["CPU"] = -1.0
    assert made.resources_per_replica == {"CPU": 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.max_replicas = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "scaling: {max_replica: 4}",
            "scaling.max_replica = 4: there is no such field; did you mean 'max_replicas'?",
        ),
        ("scalings: {}", "scalings = {}: there is no such field; did you mean 'scaling'?"),
        ("zzz: 1", "zzz = 1: there is no such field; the fields here are name, scaling, batch"),
        ("scaling: {}", "scaling.max_replicas is missing"),
        ("scaling: 3", "scaling = 3: must be a mapping of field names to values, for ScalingConfig"),
        ("scaling: {max_replicas: 2.5}", "scaling.max_replicas = 2.5: must be a whole number of at least 1"),
        ("scaling: {max_replicas: true}", "scaling.max_replicas = True: must be a whole number"),
        ("scaling: {max_replicas: 2, min_replicas: 3}", "scaling.min_replicas = 3: must not be above"),
        (
            "scaling: {max_replicas: 2, replicas: 3}",
            "scaling.replicas = 3: must be from scaling.min_replicas = 1 to",
        ),
        (
            "scaling: {max_replicas: 1, resources_per_replica: {CPU: x}}",
            "scaling.resources_per_replica['CPU'] = 'x'",
        ),
        (
            "batch: {global_batch_size: 65, logical_shards: 8}",
            "batch.global_batch_size = 65: must be a multiple of",
        ),
        ("batch: {global_batch_size: 65, logical_shards: 8}", "such as 64 or 72"),
        ("batch: {global_batch_size: 3, logical_shards: 8}", "such as 8"),
        ("batch: {global_batch_size: 8, logical_shards: 8, last_batch: pad}", "must be one of drop, partial"),
        (
            "failure: {non_finite: skipp}",
            "failure.non_finite = 'skipp': must be one of stop, skip, ignore; did you",
        ),
        (
            "failure: {network: -1}",
            "failure.network = -1: must be a whole number of at least 0, or none for no limit",
        ),
        ("failure: {backoff_s: 400}", "failure.backoff_cap_s = 300.0: must be above failure.backoff_s = 400"),
        (
            "detection: {heartbeat_s: 3}",
            "detection.heartbeat_timeout_s = 5.0: must be above 2 × detection.heartbeat_s",
        ),
        (
            "detection: {lease_s: 5}",
            "detection.lease_s = 5: must be above detection.heartbeat_timeout_s = 5.0",
        ),
        ("detection: {hang_floor_s: .nan}", "detection.hang_floor_s = nan: must be a number above 0"),
        ("name: 'My Run'", "name = 'My Run': must be 1 to 63 of a-z"),
        (f"name: {'x' * 64}", "must be 1 to 63 of a-z"),
        ("name: 7", "name = 7: must be text"),
        ("seed: -1", "seed = -1: must be a whole number from 0 to 9223372036854775807"),
        ("reduction: quick", "reduction = 'quick': must be one of ordered, fast"),
        ("device: cuda", "device = 'cuda': needs a GPU in scaling.resources_per_replica"),
        ("storage: runs", "storage = 'runs': must be an absolute path or a URL"),
        ("env_vars: {A: 1}", "env_vars['A'] = 1: must be text"),
        ("network: eth0", "network = 'eth0': must be a CIDR such as 10.0.0.0/16"),
        ("log_every_s: 0", "log_every_s = 0: must be a number above 0"),
        ("[1, 2]", "config = [1, 2]: must be a mapping"),
        ("a: b: c", "the config is not valid YAML"),
    ],
)
def test_a_wrong_value_is_refused_by_path_value_and_what_would_be_right(text: str, told: str) -> None:
    whole = "name: run\nscaling: {max_replicas: 4}\nbatch: {global_batch_size: 64, logical_shards: 8}\n"
    first = text.split(":")[0]
    rest = "".join(line + "\n" for line in whole.splitlines() if line.split(":")[0] != first)
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_yaml(f"{text}\n" if text.startswith("[") else f"{rest}{text}\n")
    assert told in str(refused.value)


def test_fewer_shards_than_replicas_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"logical_shards = 8: must be at least scaling.max_replicas = 9"):
        config(scaling=ScalingConfig(max_replicas=9))


def test_python_callers_hear_the_same_as_yaml() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_replicas'"):
        ScalingConfig(max_replica=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"scaling = .*: must be a ScalingConfig, not a mapping"):
        config(scaling={"max_replicas": 4})
    with pytest.raises(TypeError):
        FailureConfig("skip")  # type: ignore[call-arg]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml' cannot be read"):
        RunConfig.from_yaml(tmp_path / "nowhere.yaml")


def test_the_name_given_at_submission_is_the_default_and_must_be_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = config().to_dict()
    del values["name"]
    with pytest.raises(ConfigError, match="name is missing"):
        RunConfig.from_dict(values)
    monkeypatch.setenv("EVERSTEP_RUN_NAME", "from-submit")
    assert RunConfig.from_dict(values).name == "from-submit"
    with pytest.raises(ConfigError, match=r"name = 'run': must be 'from-submit'"):
        config()


def test_storage_comes_from_the_environment_unless_told(
    monkeypatch: pytest.MonkeyPatch, own_storage: Path
) -> None:
    assert config().storage == str(own_storage)
    monkeypatch.delenv("EVERSTEP_STORAGE")
    assert config().storage == str(Path.home() / "everstep")
    assert config(storage="s3://bucket/x").storage == "s3://bucket/x"


@pytest.mark.parametrize(
    "cls", [ScalingConfig, BatchConfig, FailureConfig, DetectionConfig, CheckpointConfig, RunConfig]
)
def test_every_field_is_explained(cls: type) -> None:
    import ast
    import inspect

    body = ast.parse(inspect.getsource(inspect.unwrap(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert explained, ast.unparse(field)


@pytest.mark.parametrize("lease_s", [6.0, 30.0, 600.0])
def test_nobody_is_given_up_for_silence_before_its_lease_has_ended(lease_s: float) -> None:
    config = RunConfig(
        name="a",
        scaling=ScalingConfig(max_replicas=1),
        batch=BatchConfig(global_batch_size=8, logical_shards=8),
        detection=DetectionConfig(lease_s=lease_s),
    )
    assert settings_of(config).adopt_timeout_s > lease_s


def test_the_public_form_has_the_names_of_secrets_and_not_the_secrets() -> None:
    private = config(
        env_vars={"TOKEN": "hidden-1"},
        storage="s3://key:hidden-2@bucket/runs",
        checkpoint=CheckpointConfig(
            storage_options={"secret": "hidden-3", "client_kwargs": {"endpoint_url": "hidden-4"}}
        ),
    )
    public = private.to_public_dict()
    assert "hidden" not in repr(public)
    assert public["env_vars"].keys() == {"TOKEN"}
    assert public["checkpoint"]["storage_options"].keys() == {"secret", "client_kwargs"}
    assert public["storage"].startswith("s3://") and public["storage"].endswith("@bucket/runs")
    assert repr(private.to_dict()).count("hidden") == 4, "the config itself keeps them"
