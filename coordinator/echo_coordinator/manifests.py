"""The signed description of the run, made from its settings and its model."""

from echo_coordinator.config import RunSettings
from echo_coordinator.model_folder import count_parameters, read_facts
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import known_keys
from echo_coordinator.state.core import RunFacts
from echo_swarm.checkpoint.files import write_atomically
from echo_swarm.clock import Clock
from echo_swarm.envelope import seal, unseal
from echo_swarm.errors import PeerFault, SettingsError
from echo_swarm.identity import Identity
from echo_swarm.manifest import MANIFEST_LIMITS, RunManifest


def run_facts(folder: RunFolder, settings: RunSettings) -> RunFacts:
    """Return what completions are checked against."""
    facts = read_facts(folder.model)
    return RunFacts(
        run_id=settings.run.id,
        vocabulary_size=facts.vocabulary_size,
        end_token_ids=facts.end_token_ids,
        precisions=(settings.publish.precision, settings.optimizer.precision),
    )


def write_run_manifest(folder: RunFolder, settings: RunSettings, identity: Identity, clock: Clock) -> bytes:
    """Return the envelope of the RunManifest; signed anew only when the settings have changed.

    Raises:
        SettingsError: prompt and completion together exceed what the model can attend to.

    """
    facts = read_facts(folder.model)
    longest = settings.environment.max_prompt_tokens + settings.work.max_tokens
    if facts.context_tokens is not None and longest > facts.context_tokens:
        raise SettingsError(
            f"environment.max_prompt_tokens + work.max_tokens = {longest} exceeds the model's context of "
            f"{facts.context_tokens} tokens; lower one of them"
        )
    previous = _read_previous(folder, identity)
    if previous is not None and previous.run_id != settings.run.id:
        raise SettingsError(
            f"run.id was changed: nodes know this run as {previous.run_id}; write that back, or "
            "make a new run with init"
        )
    manifest = RunManifest(
        protocol=1,
        run_id=settings.run.id,
        name=settings.run.name,
        created_at=clock.wall_s() if previous is None else previous.created_at,
        publisher_key=identity.public_key,
        mode=settings.work.mode,
        max_staleness=settings.work.max_staleness,
        model_config_json=facts.config_json,
        parameters=count_parameters(folder.model),
        vocabulary_size=facts.vocabulary_size,
        end_token_ids=facts.end_token_ids,
        max_prompt_tokens=settings.environment.max_prompt_tokens,
        max_completion_tokens=settings.work.max_tokens,
        environment=_public_name(settings.environment.name),
        description=settings.run.description,
        mirrors=settings.publish.mirrors,
        require_followed_seeds=settings.audits.require_followed_seeds,
    )
    if previous == manifest:
        return folder.run_manifest.read_bytes()
    envelope = seal(identity, manifest)
    write_atomically(folder.run_manifest, envelope)
    return envelope


def _public_name(environment: str) -> str:
    """Return what volunteers are told of an environment: of a path only its last part, and no more than a Name has."""
    kind, colon, argument = environment.partition(":")
    return f"{kind}{colon}{argument.rsplit('/', 1)[-1]}"[:64]


def _read_previous(folder: RunFolder, identity: Identity) -> RunManifest | None:
    try:
        signed = unseal(folder.run_manifest.read_bytes(), RunManifest, MANIFEST_LIMITS)
    except (OSError, PeerFault):
        return None
    keys = known_keys(folder, signed.message.run_id, identity)
    return signed.message if signed.signer == keys.key or keys.after(signed.signer) else None
