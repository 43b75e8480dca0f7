import re
from pathlib import Path

import pytest

from ddpcheck.findings.errors import ConfigError, UsageError
from ddpcheck.findings.rules import Severity
from ddpcheck.report.settings import Settings, load_settings, misspelled_variables


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(project: Path, table: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.ddpcheck]\n{table}\n", encoding="utf-8")


def test_command_line_over_ini_over_environment_over_file_over_default(project: Path) -> None:
    def decide(flag: str | None, variable: str | None, ini: str | None, table: int | None) -> int:
        write(project, "" if table is None else f"world-size = {table}")
        environ = {} if variable is None else {"DDPCHECK_WORLD_SIZE": variable}
        return load_settings({"world_size": flag}, ini={"world_size": ini}, environ=environ).world_size

    assert decide("6", "5", "4", 3) == 6
    assert decide(None, "4", "5", 3) == 5
    assert decide(None, "4", "", 3) == 4
    assert decide(None, "", "", 3) == 3
    assert decide(None, None, None, None) == 2
    assert load_settings(environ={}) == Settings() == Settings(2, None, "cpu", 3, 30.0, 0, (), (), Severity.ERROR)


def test_every_setting_can_be_set_everywhere(project: Path) -> None:
    values = {"world_size": "4", "backend": "NCCL", "device": "cuda", "steps": "7", "timeout": "2.5", "seed": "9"}
    values |= {"select": "DDP1,hang", "ignore": "DDP109", "fail_on": "never", "format": "JSON"}
    values |= {"preload": "transformers, torch.fx"}
    modules = ("transformers", "torch.fx")
    expected = Settings(4, "nccl", "cuda", 7, 2.5, 9, ("DDP1", "hang"), ("DDP109",), None, modules, format="json")
    assert load_settings(values, environ={}) == expected
    assert load_settings(environ={f"DDPCHECK_{name.upper()}": value for name, value in values.items()}) == expected
    write(
        project,
        'world-size = 4\nbackend = "nccl"\ndevice = "cuda"\nsteps = 7\ntimeout = 2.5\nseed = 9\n'
        'select = ["DDP1", "hang"]\nignore = ["DDP109"]\nfail-on = "never"\n'
        'preload = ["transformers", "torch.fx"]\nformat = "json"',
    )
    assert load_settings(environ={}) == expected


def test_the_nearest_pyproject_counts_and_only_it(project: Path) -> None:
    write(project, "steps = 5")
    assert load_settings(environ={}, start=project / "src" / "deep").steps == 5
    (project / "src" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert load_settings(environ={}, start=project / "src" / "deep").steps == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"preload": "not a module"}, "--preload: expected names of modules, such as transformers, got 'not a module'"),
        ({"world_size": "0"}, "--world-size: expected a whole number of at least 1, got '0'"),
        ({"seed": "1.5"}, "--seed: expected a whole number of at least 0, got '1.5'"),
        ({"timeout": "inf"}, "--timeout: expected a number of seconds"),
        ({"fail_on": "fatal"}, "--fail-on: expected error, warning, note or never, got 'fatal'"),
        ({"select": ["DDP1", "unused-paramter"]}, "--select: no rule matches 'unused-paramter'; did you mean DDP101"),
        ({"ignore": "X1"}, "--ignore: no rule matches 'X1'"),
        ({"backend": " "}, "--backend: expected a word"),
    ],
)
def test_a_wrong_flag_is_a_usage_error_that_names_it(project: Path, flags: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_settings(flags, environ={})


def test_a_wrong_variable_is_a_configuration_error_that_names_it(project) -> None:
    with pytest.raises(ConfigError, match="environment variable DDPCHECK_STEPS: expected a whole number of at least 1"):
        load_settings(environ={"DDPCHECK_STEPS": "many"})


@pytest.mark.parametrize(
    ("variable", "sentences"),
    [
        ("DDPCHECK_STEP", ["ddpcheck has no such setting; did you mean 'DDPCHECK_STEPS'?"]),
        ("DDPCHECK_WORLD", ["ddpcheck has no such setting; did you mean 'DDPCHECK_WORLD_SIZE'?"]),
        ("DDPCHECK_REPRO", ["--repro can only be given on the command line"]),
        ("DDPCHECK_STEPS", []),
        ("DDPCHECK_TEST", []),
        ("DDPCHECK_", []),
        ("STEP", []),
    ],
)
def test_a_stray_variable_stops_nothing_and_a_near_miss_is_told(project, variable, sentences) -> None:
    environ = {variable: "1"}
    assert load_settings(environ=environ) == (Settings(steps=1) if variable == "DDPCHECK_STEPS" else Settings())
    ignored = f"environment variable {variable} is ignored: "
    assert misspelled_variables(environ) == [ignored + sentence for sentence in sentences]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("world-siz = 2", "pyproject.toml: [tool.ddpcheck] has no setting 'world-siz'; did you mean 'world-size'?"),
        ("steps = true", "of pyproject.toml: expected a whole number of at least 1, got True"),
        ("backend = 3", "'backend' in [tool.ddpcheck] of pyproject.toml: expected a word"),
        ("fail-on = 1", "'fail-on' in [tool.ddpcheck] of pyproject.toml: expected error"),
        ("steps = 1\nworld-size = 2\nworld_size = 3", "sets 'world-size' twice"),
        ("steps = ", "cannot read pyproject.toml"),
        ("rank-parameters = 3", "expected names or patterns of parameters, such as adapters.*, got 3"),
        ("wrapper-functions = ['reduce_mean']", "or files, such as lab/comm.py, got ['reduce_mean']"),
        ("step-function = 'lab/trainer.py'", "lab.trainer.Trainer.train_step, got 'lab/trainer.py'"),
        ("step-function = ['a.b']", "expected a function with its module"),
    ],
)
def test_a_wrong_table_is_a_configuration_error_that_names_the_file(project: Path, table: str, message: str) -> None:
    write(project, table)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_settings(environ={})


def test_what_is_not_a_table_is_refused(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool]\nddpcheck = 3\n")
    with pytest.raises(ConfigError, match="must be a table"):
        load_settings(environ={})
