"""A run's settings: one TOML file, checked as a whole when the run starts. docs/settings.md explains each."""

import difflib
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.standing_settings import StandingSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_coordinator.trainer.settings import (
    LoraSettings,
    ObjectiveSettings,
    OptimizerSettings,
    Precision,
    correction_warnings,
)
from echo_swarm.addresses import ListenAddress, Multiaddress, PeerAddress
from echo_swarm.checkpoint.reach import is_mirror_url
from echo_swarm.errors import SettingsError
from echo_swarm.plain_errors import NO_SUCH, problems
from echo_swarm.wire import Name, RunId, Text


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError("each precision once")
    return names


def _mirror_url(url: str) -> str:
    if not is_mirror_url(url):
        raise ValueError(f"{url!r} is no base URL such as https://files.example.org/echo")
    return url


MirrorUrl = Annotated[str, Field(max_length=512), AfterValidator(_mirror_url)]
GgufPrecision = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunSection(_Section):
    """What the run is called and when it ends."""

    id: RunId
    """32 hex digits, made by `init`. Never change it: nodes know the run by it."""
    name: Name
    """For people."""
    base_model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Hub id of the model, written by `init` when it was given one. An exported adapter names it as its base; when not
    set, it names RUN/model. What is trained is always RUN/model."""
    description: Text = ""
    """For people; shown by nodes when they join."""
    updates: Annotated[int, Field(ge=1)] | None = None
    """End the run after so many updates; when not set, it runs until stopped."""


class EnvironmentSection(_Section):
    """Where prompts and rewards come from."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    """`reasoning_gym:NAME`, `jsonl:PATH`, or a plug-in's name."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1 << 17)] = 512
    """Longer prompts are skipped, and counted."""
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Handed to the environment, which checks them; for reasoning_gym also the data set's own settings."""


class ScoringSection(_Section):
    """The children that compute rewards."""

    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Completions scored at the same time."""
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """For one completion; its scorer is killed after that."""


class EvaluationSection(_Section):
    """Held-out evaluation by the swarm, greedy."""

    every: Annotated[int, Field(ge=0)] = 10
    """Versions between evaluations; 0: none."""
    prompts: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Of the environment's held-out set, the same ones each time."""
    max_wait_s: Annotated[float, Field(gt=0)] = 600.0
    """An evaluation that takes longer is recorded as far as it is."""


class PublishSection(_Section):
    """How versions are published."""

    precision: Precision = "float32"
    """Of the published weights."""
    gguf: Annotated[tuple[GgufPrecision, ...], AfterValidator(_each_once)] = ()
    """Files for llama.cpp beside them, one of each precision named: `["q8_0"]` for peers on CPUs, `f16` for GPUs. For
    Llama, Qwen2 and Qwen3 models. None by default: each one delays every version by its conversion."""
    deltas: bool = True
    """Publish each version also as its difference from the one before, where that is smaller. For bfloat16 it has about
    1 % of the bytes at learning rate 1e-6, 10 % at 1e-4. Costs the coordinator about a second for each GB."""
    mirrors: Annotated[tuple[MirrorUrl, ...], Field(max_length=8)] = ()
    """Base URLs (http or https) of file servers with the folder that `echo-coordinator mirror` writes; nodes fetch from
    them too."""
    keep_versions: Annotated[int, Field(ge=1)] | None = None
    """Published versions kept on disk; when not set, max_staleness + 2."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 3
    """Trainer checkpoints (weights and optimizer) kept on disk."""
    valid_s: Annotated[float, Field(gt=0)] = 86_400.0
    """After this, a node warns that the coordinator has gone quiet."""


class NetworkSection(_Section):
    """Where the coordinator listens and what the invite says."""

    listen: Annotated[tuple[ListenAddress, ...], Field(min_length=1, max_length=8)] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddresses. `init` writes a fixed port, so that invites stay valid."""
    announce: Annotated[tuple[Multiaddress, ...], Field(max_length=8)] = ()
    """Multiaddresses that the invite names instead of the ones found (a public name, a forwarded port)."""
    bootstrap: Annotated[tuple[PeerAddress, ...], Field(max_length=16)] = ()
    """Other peers of the DHT, each ending in /p2p/<peer id>; they go into the invite too."""
    max_upload_mbit: Annotated[float, Field(ge=0.5, le=1e6)] | None = None
    """Most Mbit/s of pieces of versions to nodes; when not set, no limit. Nodes pass pieces on to each other."""
    service_bytes: Annotated[int, Field(ge=16 << 20)] = 256 << 20
    """Memory for requests and unread answers of all peers together, for work and for pieces each. What it does not hold
    waits in the network; slow streams end when others have to wait for them."""


class RunSettings(_Section):
    """The whole of run.toml."""

    run: RunSection
    environment: EnvironmentSection
    work: WorkSettings = WorkSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings | None = None
    scoring: ScoringSection = ScoringSection()
    evaluation: EvaluationSection = EvaluationSection()
    probes: ProbeSettings = ProbeSettings()
    audits: AuditSettings = AuditSettings()
    standing: StandingSettings = StandingSettings()
    publish: PublishSection = PublishSection()
    network: NetworkSection = NetworkSection()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        correction_warnings(self.objective, self.work.max_staleness)
        kept = self.publish.keep_versions
        if kept is not None and kept < self.work.max_staleness + 1:
            raise SettingsError(
                f"publish.keep_versions = {kept} is too few for max_staleness = {self.work.max_staleness}: nodes may "
                f"still need version n - {self.work.max_staleness}; set it to {self.work.max_staleness + 1} or more"
            )
        if self.audits.require_followed_seeds and not self.audits.share:
            raise SettingsError(
                "audits.require_followed_seeds asks for audits, and audits.share = 0 makes none; give them a share, "
                "such as 0.02"
            )
        return self

    @property
    def keep_versions(self) -> int:
        """Published versions kept."""
        return self.publish.keep_versions or self.work.max_staleness + 2


def load_settings(folder: RunFolder) -> RunSettings:
    """Read RUN/run.toml. Raises SettingsError naming each setting that is wrong."""
    path = folder.settings
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = RunSettings.model_validate(given)
    except OSError as e:
        raise SettingsError(f"cannot read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise SettingsError(f"{path} is not valid TOML: {e}") from e
    except ValidationError as e:
        listed = [f"{name}: {_with_pointer(name, said)}" if name else said for name, said in problems(e)]
        raise SettingsError(f"{path}: " + "; ".join(listed)) from e
    if mistyped := list(_mistyped("", given, settings)):
        raise SettingsError(f"{path}: " + "; ".join(mistyped))
    return settings


def _mistyped(where: str, given: dict[str, Any], parsed: BaseModel) -> Iterator[str]:
    """Yield what was written as another type than it is: a number in quotes, a number for true or false."""
    for key, value in given.items():
        name, meant = f"{where}{key}", getattr(parsed, key, None)
        if isinstance(meant, BaseModel) and isinstance(value, dict):
            yield from _mistyped(f"{name}.", value, meant)
        elif isinstance(value, str) and isinstance(meant, int | float):
            yield f"{name}: {value!r} is text; leave out the quotes"
        elif isinstance(value, bool | int | float) and isinstance(value, bool) != isinstance(meant, bool):
            yield f"{name}: {value} is {'no number' if isinstance(value, bool) else 'neither true nor false'}"


def _with_pointer(name: str, said: str) -> str:
    if said != NO_SUCH:
        return said
    *sections, key = name.split(".")
    model: Any = RunSettings
    for section in sections:
        model = model.model_fields[section].annotation
    parts = RunSettings.model_fields.items()
    elsewhere = [f"{part}.{key}" for part, f in parts if key in getattr(f.annotation, "model_fields", ())]
    meant = (elsewhere or difflib.get_close_matches(key, model.model_fields, 1) or [""])[0]
    return f"{said}{f' (did you mean {meant}?)' if meant else ''}; docs/settings.md lists them"
