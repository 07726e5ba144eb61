"""What to type for an optional part works in a checkout, whatever an index has under this name."""

from pathlib import Path

from echo_swarm import extras


def test_a_checkout_is_installed_from_itself_and_anything_else_by_name(monkeypatch, tmp_path: Path) -> None:
    root = Path(extras.__file__).parents[1]
    assert extras.install_command("torch") == f"pip install '{root}[torch]'"
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras.install_command("torch") == "pip install 'echo-swarm[torch]'"
