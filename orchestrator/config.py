"""What a run can be told: one frozen config per concern, checked when it is made.

Called by the user's script, by the controller and by the command line. Imports neither ray nor torch; only
`RunConfig.from_yaml` touches a file. Every wrong value raises ConfigError, which names the field, the value
and what would be right, before anything is started.

    RunConfig
    ├── scaling    ScalingConfig     how many replicas, and what each needs
    ├── batch      BatchConfig       the global batch and its logical shards
    ├── failure    FailureConfig     how much may go wrong before the run gives up
    ├── detection  DetectionConfig   how long to wait for whom
    └── checkpoint CheckpointConfig  when the state goes to storage
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from everstep.errors import ConfigError
from everstep.orchestrator import environment
from everstep.orchestrator.config_rules import (
    Rule,
    build,
    check,
    instance,
    number,
    one_of,
    plain,
    refuse,
    section,
    whole,
)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SECRET = "***"


@section("scaling")
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How many replicas the run wants, and what each of them needs. Raises ConfigError."""

    min_replicas: int = 1
    """Replicas below which the run waits instead of training. 1, because any survivor can go on."""
    max_replicas: int
    """Replicas above which the run takes no more, also when nodes are free. No default: it is the user's budget."""
    replicas: int | None = None
    """Replicas wished for at the start; `everstep scale` changes it. None: `max_replicas`."""
    spares: int = 0
    """Warm replicas beyond the wish that wait to replace a lost one. 0, because each holds a device idle."""
    resources_per_replica: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    """Ray resources of one replica, such as `{"CPU": 4, "GPU": 1}`. One CPU, so that a first try runs anywhere."""

    def __post_init__(self) -> None:
        check(
            self,
            "scaling",
            {
                "min_replicas": whole(1),
                "max_replicas": whole(1),
                "replicas": whole(1, optional=True),
                "spares": whole(0),
                "resources_per_replica": instance(Mapping),
            },
        )
        _check_mapping("scaling.resources_per_replica", self.resources_per_replica, number(at_least=0))
        object.__setattr__(self, "resources_per_replica", dict(self.resources_per_replica))
        if self.min_replicas > self.max_replicas:
            right = f"must not be above scaling.max_replicas = {self.max_replicas}"
            refuse("scaling.min_replicas", self.min_replicas, right)
        if not self.min_replicas <= self.wished <= self.max_replicas:
            right = f"must be from scaling.min_replicas = {self.min_replicas} to max_replicas = {self.max_replicas}"
            refuse("scaling.replicas", self.replicas, right)

    @property
    def wished(self) -> int:
        """Replicas wished for at the start."""
        return self.max_replicas if self.replicas is None else self.replicas


@section("batch")
@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The global batch and the fixed slices it is computed in. Raises ConfigError."""

    global_batch_size: int
    """Samples of one step, over all replicas. The same at every world size, so the learning rate is too."""
    logical_shards: int
    """V, the fixed number of equal slices of each global batch. Never changes during a run: results hang on
    it. At least `max_replicas`; twice that or more lets unequal replicas share fairly. A power of two makes
    ordered reduction cheapest."""
    last_batch: Literal["drop", "partial"] = "drop"
    """What an epoch does with the samples that do not fill a global batch: `drop` leaves them out (every step
    equal), `partial` trains on them in one smaller step."""

    def __post_init__(self) -> None:
        rules = {
            "global_batch_size": whole(1),
            "logical_shards": whole(1),
            "last_batch": one_of("drop", "partial"),
        }
        check(self, "batch", rules)
        if left := self.global_batch_size % self.logical_shards:
            below = self.global_batch_size - left
            near = " or ".join(str(size) for size in (below, below + self.logical_shards) if size)
            right = f"must be a multiple of batch.logical_shards = {self.logical_shards}, such as {near}"
            refuse("batch.global_batch_size", self.global_batch_size, right)

    @property
    def shard_size(self) -> int:
        """Samples of one logical shard of a full global batch."""
        return self.global_batch_size // self.logical_shards


@section("failure")
@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig:
    """What the run does about failures, and how many of each class it absorbs. Raises ConfigError.

    Each class has its own budget: that many within `window_s` (out of memory: in the whole run), then the run ends with
    BudgetExhausted. None is no limit, 0 ends the run at the first. Errors of the user's own code have no budget: they end the run.
    """

    non_finite: Literal["stop", "skip", "ignore"] = "stop"
    """A loss or gradient that is NaN or infinite: `stop` the run, `skip` the step's update on every replica, or
    `ignore` it. Stop, because a run that trains on NaN is lost without a word."""
    process_crashes: int | None = 5
    """Replica processes that died by themselves. A few are bad luck, more are a bug worth stopping for."""
    node_losses: int | None = None
    """Nodes that vanished. No limit: it is what the run is built for."""
    preemptions: int | None = None
    """Nodes that were taken away with notice. No limit: it is what spot nodes do."""
    network: int | None = 10
    """Replicas given up because they could not be reached while their process lived."""
    out_of_memory: int | None = 1
    """Replicas killed for memory. One retry, since the next replica usually dies at the same place."""
    unknown: int | None = 3
    """Losses whose cause could not be told."""
    window_s: float = 3600.0
    """Seconds that a failure counts against its budget. An hour: a week's run forgives last night."""
    backoff_s: float = 1.0
    """Seconds before the first replacement of a lost replica; doubled for each further loss in a row. The
    survivors do not wait for it."""
    backoff_cap_s: float = 300.0
    """Longest of these waits, in seconds."""

    def __post_init__(self) -> None:
        classes = ("process_crashes", "node_losses", "preemptions", "network", "out_of_memory", "unknown")
        rules = {"non_finite": one_of("stop", "skip", "ignore"), "window_s": number(above=0)}
        rules |= {name: whole(0, optional=True) for name in classes}
        rules |= {"backoff_s": number(at_least=0), "backoff_cap_s": number(at_least=0)}
        check(self, "failure", rules)
        _check_order("failure", self, "backoff_s", "backoff_cap_s", 1.0, may_equal=True)


@section("detection")
@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionConfig:
    """How long the run waits for whom. All in seconds; every wait of a run ends by one of these.

    Most failures are seen in milliseconds without any of them (a reset socket, a dead actor). These are for
    what gives no sign: a cut network, a frozen process, a hang. Raises ConfigError.
    """

    heartbeat_s: float = 0.5
    """Between two heartbeats of a replica to the controller. A 10,000-replica run sends 20,000 a second."""
    heartbeat_timeout_s: float = 5.0
    """Without a heartbeat after which a replica is given up. Ten beats: a busy machine is not a dead one."""
    lease_s: float = 30.0
    """Without a word of the controller after which a replica stops itself. Longer than a controller's restart,
    so that training goes on through one."""
    hang_floor_s: float = 10.0
    """Least hang deadline; the deadline itself comes from measured step times. Above a slow batch or a pause
    of Python's garbage collector."""
    first_step_s: float = 300.0
    """For the first step of a replica, which compiles, fills caches and has no measured time to compare with."""
    start_timeout_s: float = 300.0
    """From a replica's launch until it is ready. Images are pulled and libraries imported in it."""
    park_timeout_s: float = 5.0
    """For survivors to leave their collective when a generation ends; who does not is given up."""
    form_timeout_s: float = 10.0
    """For a generation to connect; after it one more generation is tried."""
    settle_s: float = 2.0
    """That a generation waits for more replicas than are ready, so that a start or a scale-up does not re-form once per
    replica. Those whose process already runs are waited for up to ten times as long at the start, five times later."""
    driver_grace_s: float | None = 60.0
    """That a run goes on without a driver, for it to be submitted again. None: for ever."""

    def __post_init__(self) -> None:
        positive = ["heartbeat_s", "heartbeat_timeout_s", "lease_s", "hang_floor_s", "first_step_s"]
        positive += ["start_timeout_s", "park_timeout_s", "form_timeout_s"]
        rules = {name: number(above=0) for name in positive}
        rules |= {"settle_s": number(at_least=0), "driver_grace_s": number(at_least=0, optional=True)}
        check(self, "detection", rules)
        _check_order("detection", self, "heartbeat_s", "heartbeat_timeout_s", 2.0)
        _check_order("detection", self, "heartbeat_timeout_s", "lease_s", 1.0)
        _check_order("detection", self, "heartbeat_s", "hang_floor_s", 1.0)


@section("checkpoint")
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the state goes to storage, beside the training, and how much of it stays there. Raises ConfigError.

    A checkpoint costs the loop a copy of each replica's part of the state. Lost replicas are replaced from the memory of
    the others; checkpoints are for when all are lost.
    """

    every_s: float | None = 600.0
    """Seconds between two checkpoints. Ten minutes: what a whole cluster's loss costs at most. None: not by time."""
    every_steps: int | None = None
    """Also after each so many steps. One that is due while the last is still being written is left out, and said."""
    at_end: bool = True
    """Also after the last step: what was trained is in storage when the run has finished. Counts only where `every_s` or
    `every_steps` is given; with neither, nothing is written."""
    keep_last: int = 3
    """So many of the newest stay. One to use, one if that turns out damaged, one more."""
    keep_every: int | None = None
    """Also those whose step is a multiple of this. None: no others."""
    bytes_per_s: float | None = None
    """Bound on what each node writes. None: as fast as the storage takes it."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: a run begins with the newest whole checkpoint of its name, if there is one. `never`: with step 0; there must
    be no checkpoint of its name then."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """For the fsspec filesystem of `storage`. Prefer the environment variables of the store's own tools: what stands here is
    kept in the run's configuration."""

    def __post_init__(self) -> None:
        rules = {
            "every_s": number(above=0, optional=True),
            "every_steps": whole(1, optional=True),
            "at_end": instance(bool),
            "keep_last": whole(1),
            "keep_every": whole(1, optional=True),
            "bytes_per_s": number(above=0, optional=True),
            "resume": one_of("auto", "never"),
            "storage_options": instance(Mapping),
        }
        check(self, "checkpoint", rules)
        object.__setattr__(self, "storage_options", dict(self.storage_options))

    @property
    def wanted(self) -> bool:
        """Whether any checkpoint will be written."""
        return self.every_s is not None or self.every_steps is not None


@section("")
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run. The same config may be given again to go on with a run of that name. Raises ConfigError."""

    name: str = field(default_factory=lambda: _submitted_name())
    """Names the run on the cluster and in storage: 1 to 63 of `a-z 0-9 . _ -`, first a letter or digit.
    Default: what `everstep submit --name` said."""
    scaling: ScalingConfig
    """How many replicas, and what each needs."""
    batch: BatchConfig
    """The global batch and its logical shards."""
    failure: FailureConfig = field(default_factory=FailureConfig)
    """How much may go wrong before the run gives up."""
    detection: DetectionConfig = field(default_factory=DetectionConfig)
    """How long to wait for whom."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state goes to storage."""
    seed: int = 0
    """Data order and random numbers hang on it, the step and the logical shard alone. 0 to 2^63 - 1."""
    reduction: Literal["ordered", "fast"] = "ordered"
    """How gradients are summed: `ordered` gives the same bits at every world size, `fast` is plain all-reduce."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where replicas compute. `auto`: cuda when `resources_per_replica` asks for a GPU, else cpu."""
    storage: str = field(default_factory=environment.default_storage)
    """Where the run's events and checkpoints are kept: an absolute path or an fsspec URL such as `s3://bucket/runs`. Default:
    `EVERSTEP_STORAGE`, else `~/everstep`. On several machines it must be a place that all of them see."""
    bucket_bytes: int = 25 * 2**20
    """Gradient bytes that are reduced together while backward goes on. 25 MiB, as in torch's own DDP."""
    log_every_s: float = 5.0
    """Seconds between two progress lines in the job's log. Changes of membership are shown at once."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the replicas, on top of the job's own."""
    network: str | None = None
    """Network that replicas talk on, as a CIDR such as `10.0.0.0/16`; each uses its own address in it. None:
    the address by which Ray knows the node."""

    def __post_init__(self) -> None:
        check(
            self,
            "",
            {
                "name": instance(str),
                "scaling": instance(ScalingConfig),
                "batch": instance(BatchConfig),
                "failure": instance(FailureConfig),
                "detection": instance(DetectionConfig),
                "checkpoint": instance(CheckpointConfig),
                "seed": whole(0, below=2**63),
                "reduction": one_of("ordered", "fast"),
                "device": one_of("auto", "cpu", "cuda"),
                "storage": instance(str),
                "bucket_bytes": whole(1),
                "log_every_s": number(above=0),
                "env_vars": instance(Mapping),
                "network": instance(str, optional=True),
            },
        )
        _check_mapping("env_vars", self.env_vars, instance(str))
        object.__setattr__(self, "env_vars", dict(self.env_vars))
        object.__setattr__(self, "storage", environment.expand_home(self.storage))
        _check_name(self.name)
        _check_storage(self.storage)
        _check_network(self.network)
        _check_shards(self)
        _check_device(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The config of a plain mapping, nested as the fields are. Raises ConfigError, also for unknown fields."""
        return build(cls, "", values, _SECTIONS)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, JSON-safe; `from_dict` gives an equal config back."""
        return plain(self)

    def to_public_dict(self) -> dict[str, Any]:
        """`to_dict` for a run's record, which is no place for secrets: values of `env_vars` and `storage_options`, and
        what stands before the host in `storage`, are left out."""
        values = self.to_dict()
        for holder, name in ((values, "env_vars"), (values["checkpoint"], "storage_options")):
            holder[name] = dict.fromkeys(holder[name], _SECRET)
        values["storage"] = re.sub(r"://[^/@]*@", f"://{_SECRET}@", self.storage)
        return values

    @classmethod
    def from_yaml(cls, path_or_text: str | Path) -> RunConfig:
        """The config of a YAML file or text. A `Path`, or one line that ends in .yaml or .yml, is a file.

        Raises ConfigError for a file that cannot be read, text that is not YAML, and wrong fields.
        """
        import yaml

        text = _read(path_or_text)
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the config is not valid YAML: {error}") from None
        return cls.from_dict(values)


_SECTIONS: Mapping[str, type] = {
    "scaling": ScalingConfig,
    "batch": BatchConfig,
    "failure": FailureConfig,
    "detection": DetectionConfig,
    "checkpoint": CheckpointConfig,
}


def _submitted_name() -> str:
    name = environment.submitted_run_name()
    if name is None:
        raise ConfigError(
            "name is missing: give RunConfig a name, or submit with `everstep submit --name RUN`"
        )
    return name


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        refuse("name", name, "must be 1 to 63 of a-z, 0-9, '.', '_', '-', the first a letter or digit")
    submitted = environment.submitted_run_name()
    # Two names for one job would let `everstep submit --name` start a run twice instead of attaching to it.
    if submitted not in (None, name):
        right = f"must be {submitted!r}, as given to `everstep submit --name`; or leave it out of RunConfig"
        refuse("name", name, right)


def _check_storage(storage: str) -> None:
    # Controller and driver have other working directories: a relative path would be two places.
    if "://" not in storage and not Path(storage).is_absolute():
        refuse("storage", storage, "must be an absolute path or a URL such as s3://bucket/runs")


def _check_network(network: str | None) -> None:
    try:
        if network is not None:
            ipaddress.ip_network(network)
    except ValueError as error:
        refuse("network", network, f"must be a CIDR such as 10.0.0.0/16 ({error})")


def _check_shards(config: RunConfig) -> None:
    shards, replicas = config.batch.logical_shards, config.scaling.max_replicas
    if shards < replicas:
        right = f"must be at least scaling.max_replicas = {replicas}, since each replica computes whole logical shards"
        refuse("batch.logical_shards", shards, f"{right}; raise logical_shards or lower max_replicas")


def _check_device(config: RunConfig) -> None:
    # Ray hides all GPUs from an actor that asks for none.
    if config.device == "cuda" and not config.scaling.resources_per_replica.get("GPU"):
        refuse(
            "device",
            config.device,
            "needs a GPU in scaling.resources_per_replica, such as {'CPU': 1, 'GPU': 1}",
        )


def _check_mapping(path: str, values: Mapping[Any, object], rule: Rule) -> None:
    for key, value in values.items():
        if not isinstance(key, str) or not key:
            refuse(path, dict(values), f"its keys must be text, and {key!r} is not")
        if right := rule(value):
            refuse(f"{path}[{key!r}]", value, right)


def _check_order(
    section: str, config: object, less: str, more: str, times: float, may_equal: bool = False
) -> None:
    low, high = getattr(config, less), getattr(config, more)
    if high > times * low or (may_equal and high == times * low):
        return
    factor = f"{times:g} × " if times != 1.0 else ""
    refuse(f"{section}.{more}", high, f"must be above {factor}{section}.{less} = {low}")


def _read(path_or_text: str | Path) -> str:
    text = str(path_or_text).strip()
    if isinstance(path_or_text, str) and ("\n" in text or not text.endswith((".yaml", ".yml"))):
        return path_or_text
    try:
        return Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {str(path_or_text)!r} cannot be read: {error}") from None
