"""The command line without a check: what is printed where, and with which exit code."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpcheck import cli
from ddpcheck.cli.arguments import make_parser
from ddpcheck.cli.parsing import EXAMPLES
from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.report import Finding, Report, ReportError
from ddpcheck.findings.rules import RULES, Severity

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("ddpcheck")
INSTALLED = pytest.mark.skipif(not SCRIPT.exists(), reason="ddpcheck is not installed")
MODULE = pytest.param([sys.executable, "-m", "ddpcheck"], id="python -m ddpcheck")
UNUSED = Finding("DDP101", ("[red]head",), "It is never read.", Severity.ERROR)
ZERO = Finding("DDP107", ("gate",), "Its gradient is zero.", Severity.WARNING)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in [*filter(lambda name: name.startswith("DDPCHECK_"), os.environ), "COLUMNS", "FORCE_COLOR"]:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def stub_check(monkeypatch: pytest.MonkeyPatch):
    """Replace the check by one that returns or raises what the test says; gives the calls that were made."""
    calls = []

    def install(outcome):
        def check(target, **options):
            calls.append((target, options))
            options["progress"]("step 1: backward")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module = type(sys)("ddpcheck.report.checking.check")
        module.check = check
        monkeypatch.setitem(sys.modules, "ddpcheck.report.checking.check", module)
        return calls

    return install


def run(command: list[str], *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environ, timeout=60, **options)


@pytest.mark.parametrize("command", [pytest.param([str(SCRIPT)], id="ddpcheck", marks=INSTALLED), MODULE])
def test_both_spellings_explain_rules_and_give_their_version(command: list[str]) -> None:
    done = run(command, "explain", "ddp101", "hang")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("DDP101 unused-parameter (error)\n") and "DDP402 hang" in done.stdout
    for part in ("Why it matters", "Fix", "Example", "    self.head = nn.Linear(8, 2)"):
        assert part in done.stdout
    assert re.match(r"ddpcheck 0\..* \(torch 2\..*, Python 3\..*\)\n", run(command, "--version").stdout)


@pytest.mark.parametrize(
    "command", [pytest.param([str(SCRIPT)], id="ddpcheck", marks=[INSTALLED, pytest.mark.slow]), MODULE]
)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "hangs"], "no rule matches 'hangs'; did you mean DDP402 (hang)?"),
        (["report"], "the following arguments are required: TARGET (see `ddpcheck report --help`)"),
        (
            ["report", "x.py", "--worldsize", "2"],
            "unrecognized arguments: --worldsize 2; did you mean --world-size? (see `ddpcheck report --help`)",
        ),
        (["render", "nowhere.json"], "cannot read nowhere.json: No such file or directory"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(command: list[str], arguments: list[str], sentence: str) -> None:
    done = run(command, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ddpcheck: error: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reprot"], "there is no command 'reprot'; did you mean 'report'? (see `ddpcheck --help`)"),
        (["xyz"], "there is no command 'xyz'; choose from report, run, hang,"),
        (["--vresion"], "unrecognized arguments: --vresion; did you mean --version? (see `ddpcheck --help`)"),
        (["report", "x.py", "--zzz"], "unrecognized arguments: --zzz (see `ddpcheck report --help`)"),
        (["report", "x.py", "y.py"], "unrecognized arguments: y.py (see `ddpcheck report --help`)"),
        (
            ["run", "--check-slect", "DDP1", "x.py"],
            "unrecognized arguments: --check-slect; did you mean --check-select? (see `ddpcheck run --help`)",
        ),
        (["run", "-o", "x.html", "x.py"], "unrecognized arguments: -o; did you mean --check-output?"),
        (["run", "--epochs", "1", "x.py"], "unrecognized arguments: --epochs; put arguments of the script after the "),
        (
            ["report", "x.py", "--nproc-per-node", "2"],
            "unrecognized arguments: --nproc-per-node 2; did you mean --world-",
        ),
        (["run", "--check-select", "DDP7", "x.py"], "--check-select: no rule matches 'DDP7'; see `ddpcheck rules`"),
        (["explain", "DDP999"], "no rule matches 'DDP999'; see `ddpcheck rules`"),
        (["explain", "DPD101"], "no rule matches 'DPD101'; did you mean DDP101 (unused-parameter)?"),
        (["explain", "DDP1011"], "no rule matches 'DDP1011'; did you mean DDP101 (unused-parameter) or DDP111"),
        (["render", "r.json", "-o", "a", "--output", "b"], "--output names two files: a and b; leave one out"),
        (["run", "--check-output=a", "--check-output=b", "x.py"], "--check-output names two files: a and b;"),
        (["run", "tset_cli.py"], "no such file: tset_cli.py; did you mean 'test_cli.py'?"),
        (["run"], "there is no script to run, as in `ddpcheck run "),
        (["run", "--standalone"], "there is no script to run, as in `ddpcheck run "),
        (["run", "--check-baseline", "none.json", cli.__file__], "cannot read none.json: No such file or directory"),
    ],
)
def test_what_was_probably_meant_is_told(capsys, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "test_cli.py").touch()
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "") and captured.err.startswith(f"ddpcheck: error: {sentence}")
    assert captured.err.count("\n") == 1


def test_the_help_of_run_is_its_own_and_that_of_torchrun_is_behind_an_option(capsys) -> None:
    shown = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main(["run", option])
        shown.append(capsys.readouterr().out)
    assert all("--check-parity" in text and "exit codes" in text for text in shown)
    assert ["--rdzv-conf" in text for text in shown] == [False, True]
    assert "--rdzv_conf" not in shown[1]


@pytest.mark.parametrize("command", list(EXAMPLES))
def test_help_shows_examples_that_can_be_parsed(command: str, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main([*filter(None, [command]), "--help"])
    out = capsys.readouterr().out
    for example, words in EXAMPLES[command]:
        assert example in out and words in out
        asked = shlex.split(example.partition(" > ")[0])[1:]
        if asked[0] != "run":  # whose options are torchrun's
            assert make_parser().parse_args(asked).command


def test_rules_lists_every_rule(capsys) -> None:
    assert cli.main(["rules"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {rule.code} {rule.name} " in out for rule in RULES.values())


def test_rules_as_json_hold_all_that_explain_says(capsys) -> None:
    assert cli.main(["rules", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [rule["code"] for rule in data["rules"]] == list(RULES) and data["families"]["DDP1"]
    assert set(data["rules"][0]) == {
        "code",
        "name",
        "severity",
        "summary",
        "why",
        "fix",
        "detected",
        "ignore",
        "line",
        "checks",
        "reports",
        "example",
        "explains",
        "explained_by",
    }
    assert data["rules"][0]["severity"] in ("error", "warning", "note")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rules", "--format", "html"])
    assert "there is no choice for --format 'html'; choose from text, json" in capsys.readouterr().err


def test_no_command_shows_the_help_and_fails(capsys) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "report" in captured.err and "exit codes" in captured.err


def test_help_needs_no_torch() -> None:
    probe = "import sys; from ddpcheck.cli import main\ntry: main(['report', '--help'])\nexcept SystemExit: pass\n"
    done = run([sys.executable, "-c", probe + "sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0 and "--world-size" in done.stdout


@pytest.mark.parametrize(
    ("report", "fail_on", "code"),
    [
        (Report("t"), None, 0),
        (Report("t", findings=(UNUSED, ZERO)), None, 1),
        (Report("t", findings=(UNUSED,)), "never", 0),
        (Report("t", findings=(ZERO,)), None, 0),
        (Report("t", findings=(ZERO,)), "warning", 1),
        (Report("t", findings=(UNUSED,), error=ReportError("model() raised", 3)), None, 3),
        (Report("t", error=ReportError("rank 1 is stuck", 4)), "never", 4),
    ],
)
def test_a_report_goes_to_stdout_and_decides_the_exit_code(stub_check, capsys, report, fail_on, code) -> None:
    stub_check(report)
    assert cli.main(["report", "t", *(["--fail-on", fail_on] if fail_on else [])]) == code
    captured = capsys.readouterr()
    assert captured.out.startswith("ddpcheck report on t\n")
    assert captured.err == ""  # no progress where nobody watches


def test_options_reach_the_check(stub_check) -> None:
    calls = stub_check(Report("t"))
    line = (
        "report net.py:r --steps 5 --world-size 4 --backend gloo --device cuda --timeout 9 --seed 1 --select DDP1,hang"
        " --preload json,csv.x"
    )
    assert cli.main([*line.split(), "--ignore", "DDP107", "--ignore", "DDP109"]) == 0
    [(target, options)] = calls
    assert target == "net.py:r"
    assert callable(options.pop("progress"))
    assert options == {
        "world_size": 4,
        "backend": "gloo",
        "device": "cuda",
        "steps": 5,
        "timeout": 9.0,
        "seed": 1,
        "preload": ("json", "csv.x"),
        "select": ("DDP1", "hang"),
        "ignore": ("DDP107", "DDP109"),
        "suppress": (),
        "rank_parameters": (),
        "hosts": None,
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--world-size", "0"], "--world-size: expected a whole number of at least 1, got '0'"),
        (["--select", "DDP7"], "--select: no rule matches 'DDP7'"),
        (["--format", "yaml"], "there is no format 'yaml'; the formats are text, json"),
        (["--format", "htlm"], "there is no format 'htlm'; did you mean 'html'?"),
        (["-o", "report.pdf"], "cannot determine the format from the name 'report.pdf'"),
        (["-o", "missing/report.json"], "cannot write missing/report.json: No such file or directory"),
        (["-o", ".", "--format", "json"], "cannot write .: Is a directory"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(stub_check, capsys, arguments, sentence) -> None:
    calls = stub_check(Report("t"))
    assert cli.main(["report", "t", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"ddpcheck: error: {sentence}")
    assert calls == []


def test_a_file_that_may_not_be_written_is_refused_before_the_work(stub_check, capsys, tmp_path: Path) -> None:
    locked = tmp_path / "r.json"
    locked.write_text("old")
    locked.chmod(0o400)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everything")
    calls = stub_check(Report("t"))
    assert cli.main(["report", "t", "-o", str(locked)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert calls == [] and locked.read_text() == "old"


def test_output_goes_to_a_file_in_the_format_of_its_extension(stub_check, capsys, tmp_path: Path) -> None:
    stub_check(Report("t", findings=(UNUSED,)))
    assert cli.main(["report", "t", "-o", "r.json"]) == 1
    assert cli.main(["report", "t", "-o", "r.txt"]) == 1
    assert cli.main(["report", "t", "-o", "r.out", "--format", "json"]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.splitlines()[0] == "ddpcheck: 1 finding (DDP101 error), written to r.json"
    )
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("r.json", "r.out"))
    assert one.pop("command") == "ddpcheck report t -o r.json"
    assert other.pop("command") == "ddpcheck report t -o r.out --format json" and one == other
    assert "[red]head" in (tmp_path / "r.txt").read_text()


def test_a_report_is_as_long_and_as_coloured_as_asked(stub_check, capsys) -> None:
    names = tuple(f"layer{number}" for number in range(12))
    finding = Finding("DDP101", names, "Never read.", Severity.ERROR, evidence=tuple(map("line {}".format, range(20))))
    stub_check(Report("t", findings=(finding,)))

    def shown(*options: str) -> str:
        assert cli.main(["report", "t", *options]) == 1
        return capsys.readouterr().out

    assert "layer11" not in shown() and "line 19" not in shown()
    assert "layer11" in shown("-v") and "line 19" in shown("--verbose")
    assert shown("-q") == "1 finding (1 error); more on each: ddpcheck explain DDP101\n"
    assert "\x1b[" in shown("--color", "always") and "\x1b[" not in shown("--color", "never")


def test_a_check_that_fails_leaves_no_empty_file_and_keeps_an_old_one(stub_check, tmp_path: Path) -> None:
    stub_check(TargetError("no such attribute 'r'"))
    (tmp_path / "old.json").write_text("old")
    assert cli.main(["report", "t", "-o", "new.json"]) == cli.main(["report", "t", "-o", "old.json"]) == 3
    assert not (tmp_path / "new.json").exists()
    assert (tmp_path / "old.json").read_text() == "old"


def test_an_error_on_purpose_is_one_sentence_with_its_detail_indented(stub_check, capsys) -> None:
    stub_check(TargetError("net.py cannot be imported", detail="Traceback:\nNameError: x\n"))
    assert cli.main(["report", "net.py"]) == 3
    assert capsys.readouterr().err == "ddpcheck: error: net.py cannot be imported\n  Traceback:\n  NameError: x\n"


def test_a_bug_of_ours_is_one_sentence_and_debug_shows_the_traceback(stub_check, capsys) -> None:
    stub_check(ZeroDivisionError("division\nby zero"))
    assert cli.main(["report", "t"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "ddpcheck: error: ZeroDivisionError: division by zero; this is a bug in ddpcheck: please report it with the "
        "traceback that --debug shows\n"
    )
    for arguments in (["--debug", "report", "t"], ["report", "t", "--debug"]):
        with pytest.raises(ZeroDivisionError):
            cli.main(arguments)


def test_ctrl_c_ends_with_130_and_leaves_no_file(stub_check, capsys, tmp_path: Path) -> None:
    stub_check(KeyboardInterrupt())
    assert cli.main(["report", "t", "-o", "r.json"]) == 130
    assert capsys.readouterr().err == "ddpcheck: error: interrupted\n"
    assert not (tmp_path / "r.json").exists()


def test_sigterm_unwinds_what_was_started() -> None:
    probe = """
import os, signal, sys, types
from ddpcheck import cli
def check(target, **options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        print("closed")
sys.modules["ddpcheck.report.checking.check"] = types.SimpleNamespace(check=check)
sys.exit(cli.main(["report", "t"]))
"""
    done = run([sys.executable, "-c", probe])
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "closed\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to ask")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_ctrl_c_in_the_middle_of_a_run_leaves_no_rank(number: int, code: int) -> None:
    probe = """
import os, signal, sys, time, types
from ddpcheck import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
from ddpcheck.harness import World
def check(target, **options):
    with World(2) as world:
        print(*world.run(os.getpid), flush=True)
        world.run(time.sleep, 60)
sys.modules["ddpcheck.report.checking.check"] = types.SimpleNamespace(check=check)
sys.exit(cli.main(["report", "t"]))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", probe], stdout=subprocess.PIPE, env=environ, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.killpg(process.pid, number)  # as a terminal does: everybody in the foreground
        assert process.wait(timeout=50) == code
    deadline = time.monotonic() + 30
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)
    assert len(pids) == 2


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    report = Report("t", findings=tuple(Finding("DDP101", (f"p{n}" * 999,), "x", Severity.ERROR) for n in range(99)))
    (tmp_path / "r.json").write_text(report.to_json())
    command = f"{sys.executable} -m ddpcheck render r.json | head -1; echo ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", command])
    assert (done.stdout, done.stderr) == ("ddpcheck report on t\n0\n", "")


def test_a_saved_report_renders_as_anything(tmp_path: Path, capsys, monkeypatch) -> None:
    report = Report("modèle", findings=(UNUSED,))
    (tmp_path / "r.json").write_text(report.to_json(), encoding="utf-8")
    assert cli.main(["render", "r.json"]) == 0
    assert "[red]head" in capsys.readouterr().out
    assert cli.main(["render", "r.json", "--format", "json"]) == 0
    assert Report.from_json(capsys.readouterr().out) == report
    monkeypatch.setattr("sys.stdin", (tmp_path / "r.json").open(encoding="utf-8"))
    assert cli.main(["render", "-", "-o", "r.txt"]) == 0
    assert "modèle" in (tmp_path / "r.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "r.json is not a report: Expecting"),
        (b"[]", "r.json is not a report: this JSON is not a ddpcheck report"),
        (b'{"schema_version": 1}', "r.json is not a report: Object missing required field `target`"),
        (b"\xff\xfe", "cannot read r.json"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, capsys, content: bytes, sentence: str) -> None:
    (tmp_path / "r.json").write_bytes(content)
    assert cli.main(["render", "r.json"]) == 2
    assert capsys.readouterr().err.startswith(f"ddpcheck: error: {sentence}")


def test_output_survives_a_stream_that_knows_only_ascii(tmp_path: Path) -> None:
    report = Report("modèle", findings=(UNUSED,))
    (tmp_path / "r.json").write_text(report.to_json(), encoding="utf-8")
    done = run([sys.executable, "-m", "ddpcheck"], "render", "r.json", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and r"mod\xe8le" in done.stdout


def test_configuration_reaches_the_command(stub_check, capsys, tmp_path: Path, monkeypatch) -> None:
    calls = stub_check(Report("t"))
    (tmp_path / "pyproject.toml").write_text("[tool.ddpcheck]\nsteps = 7\nworld-size = 5\n")
    monkeypatch.setenv("DDPCHECK_WORLD_SIZE", "4")
    assert cli.main(["report", "t"]) == 0
    assert (calls[0][1]["steps"], calls[0][1]["world_size"]) == (7, 4)
    (tmp_path / "pyproject.toml").write_text("[tool.ddpcheck]\nstep = 7\n")
    assert cli.main(["report", "t"]) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err


def test_a_stray_variable_is_warned_of_once_where_it_nearly_is_a_setting(stub_check, capsys, monkeypatch) -> None:
    stub_check(Report("t"))
    monkeypatch.setenv("DDPCHECK_STEP", "7")
    monkeypatch.setenv("DDPCHECK_LICENCE", "none")
    assert cli.main(["report", "t"]) == 0
    assert capsys.readouterr().err == (
        "ddpcheck: warning: environment variable DDPCHECK_STEP is ignored: ddpcheck has no such setting; did you mean "
        "'DDPCHECK_STEPS'?\n"
    )


def test_the_format_can_be_set_in_the_environment_and_the_command_line_wins(
    stub_check, capsys, tmp_path: Path, monkeypatch
) -> None:
    stub_check(Report("t"))
    monkeypatch.setenv("DDPCHECK_FORMAT", "json")
    assert cli.main(["report", "t"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["target"] == "t"
    (tmp_path / "r.json").write_text(text)
    assert cli.main(["render", "r.json", "-o", "r.txt"]) == cli.main(["report", "t", "--format", "text"]) == 0
    assert (tmp_path / "r.txt").read_text() == capsys.readouterr().out
    assert cli.main(["render", "r.json", "-o", "r.out"]) == 0  # an extension that says nothing
    assert (tmp_path / "r.out").read_text() == text
    monkeypatch.setenv("DDPCHECK_FORMAT", "xml")
    assert cli.main(["report", "t"]) == 2
    assert "no format 'xml', which the environment or pyproject.toml names; the formats" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_standard_output_that_is_full_or_closed_is_said_in_one_sentence() -> None:
    for redirection, reason in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        command = f"exec {sys.executable} -m ddpcheck rules {redirection}"
        environ = dict(os.environ)  # and no COLUMNS that a library in C has set, as readline does
        done = subprocess.run(
            ["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300, env=environ
        )
        assert done.returncode == 2
        assert done.stderr.startswith("ddpcheck: error: cannot write to standard output") and reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
