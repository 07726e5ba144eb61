"""What is said of a setting that cannot be used, without the words of the library that found it."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_node.config import make_config
from echo_swarm.errors import SettingsError
from echo_swarm.plain_errors import no_such, problems


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    whole: Annotated[int, Field(ge=1, le=9)] = 1
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    choice: Literal["a", "b"] = "a"
    names: Annotated[tuple[str, ...], Field(min_length=1)] = ("x",)
    flag: bool = True
    text: Annotated[str, Field(min_length=2, max_length=3)] = "ab"
    either: int | float | None = None
    code: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = "0" * 32


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"whole": 0}, "0 is not allowed, it must be 1 or more"),
        ({"whole": 10}, "10 is not allowed, it must be 9 or less"),
        ({"whole": "ten"}, "'ten' is not allowed, it must be a whole number"),
        ({"whole": 1.5}, "1.5 is not allowed, it must be a whole number"),
        ({"share": 0}, "0 is not allowed, it must be more than 0"),
        ({"share": float("nan")}, "nan is not allowed, it must be a finite number"),
        ({"share": []}, "[] is not allowed, it must be a number"),
        ({"choice": "c"}, "'c' is not allowed, choose 'a' or 'b'"),
        ({"names": []}, "[] is not allowed, at least 1 are needed"),
        ({"names": "x"}, "'x' is not allowed, it must be a list, in square brackets"),
        ({"flag": "perhaps"}, "'perhaps' is not allowed, it must be true or false"),
        ({"text": "abcd"}, "'abcd' is not allowed, at most 3 characters are allowed"),
        ({"text": True}, "true is not allowed, it must be text (in quotes, in a file)"),
        ({"code": "x"}, "'x' is not allowed, it must be 32 hexadecimal digits"),
        ({"no": 1}, "there is no such setting"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_is_allowed(given: dict[str, object], said: str):
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate(given)
    assert problems(refused.value) == [(next(iter(given)), said)]


def test_a_long_value_is_shortened_and_a_wrong_name_gets_the_nearest():
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate({"choice": "x" * 1000})
    assert len(problems(refused.value)[0][1]) < 120
    assert no_such("devize", ("batch", "device")) == (
        "there is no setting 'devize'; did you mean device? There are: batch, device"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_upload_mbit": 0.0}, "--max-upload: 0.0 is not allowed, it must be 0.5 or more"),
        ({"patience_s": -1}, "--patience: -1 is not allowed, it must be 0 or more"),
        ({"outbound_only": True, "listen": ("/ip4/0.0.0.0/tcp/21000",)}, "--outbound-only and --listen exclude"),
    ],
)
def test_a_flag_of_a_node_is_named_as_it_was_written(tmp_path: Path, given: dict[str, object], said: str):
    with pytest.raises(SettingsError) as refused:
        make_config(state_dir=tmp_path, **given)
    assert str(refused.value).startswith(said)


def test_every_mistake_in_a_run_file_is_told_at_once(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.settings.write_text('[run]\nid = "x"\n[environment]\nname = "y"\n[work]\ngroup_sise = 4\ngroup_size = 1\n')
    with pytest.raises(SettingsError) as refused:
        load_settings(folder)
    told = str(refused.value)
    for words in (
        "run.id: 'x' is not allowed, it must be 32 hexadecimal digits",
        "run.name: it is missing",
        "work.group_size: 1 is not allowed, it must be 2 or more",
        "work.group_sise: there is no such setting (did you mean group_size?); docs/settings.md lists them",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[work]\nmax_stalenes = 2", "work.max_stalenes: there is no such setting (did you mean max_staleness?)"),
        ("[run]\nmax_staleness = 2", "run.max_staleness: there is no such setting (did you mean work.max_staleness?)"),
        ("[wrok]\nmax_staleness = 2", "wrok: there is no such setting (did you mean work?)"),
        ("[optimizer]\nzzqx = 2", "optimizer.zzqx: there is no such setting; docs/settings.md lists them"),
        ('[work]\nmax_staleness = "2"', "work.max_staleness: '2' is text; leave out the quotes"),
        ('[optimizer]\nlearning_rate = "1e-3"', "optimizer.learning_rate: '1e-3' is text; leave out the quotes"),
        ('[publish]\ndeltas = "yes"', "publish.deltas: 'yes' is text; leave out the quotes"),
        ("[publish]\ndeltas = 1", "publish.deltas: 1 is neither true nor false"),
        ("[work]\nmax_staleness = true", "work.max_staleness: True is no number"),
    ],
)
def test_a_mistyped_setting_is_named_with_what_was_meant(tmp_path: Path, line: str, said: str):
    folder = RunFolder(tmp_path)
    section, _, setting = line.partition("\n")
    rest = {"[run]": f'id = "{"ab" * 16}"\nname = "sums"', "[environment]": 'name = "y"'}
    made = {**rest, section: "\n".join(filter(None, [rest.get(section, ""), setting]))}
    folder.settings.write_text("\n".join(f"{name}\n{text}" for name, text in made.items()))
    with pytest.raises(SettingsError) as refused:
        load_settings(folder)
    assert said in str(refused.value)
