"""The command line without a check: what is printed where, and with which exit code."""

import io
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


@pytest.fixture
def main(capsys):
    """Call the command: its exit code, and what it has printed."""

    def call(*arguments):
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, **options)


def assert_refused(ended: tuple[int, str, str], sentence: str, code: int = 2) -> None:
    """One sentence, of which the beginning is given."""
    assert ended[:2] == (code, "")
    assert ended[2].startswith(f"ddpcheck: error: {sentence}") and ended[2].count("\n") == 1


@pytest.mark.skipif(not SCRIPT.exists(), reason="ddpcheck is not installed")
def test_the_installed_script_explains_rules() -> None:
    done = run(str(SCRIPT), "explain", "ddp101", "hang")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("DDP101 unused-parameter (error)\n") and "DDP402 hang" in done.stdout
    for part in ("Why it matters", "Fix", "Example", "    self.head = nn.Linear(8, 2)"):
        assert part in done.stdout


def test_the_module_ends_with_the_exit_code_of_the_command() -> None:
    done = run(sys.executable, "-m", "ddpcheck", "explain", "hangs")
    sentence = "no rule matches 'hangs'; did you mean DDP402 (hang)?"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ddpcheck: error: {sentence}\n")


TWO_FILES = "names two files: a and b;"
MEANT = {
    "report": "the following arguments are required: TARGET (see `ddpcheck report --help`)\n",
    "report x.py --worldsize 2": "unrecognized arguments: --worldsize 2; did you mean --world-size? (see `ddpcheck ",
    "report x.py --zzz": "unrecognized arguments: --zzz (see `ddpcheck report --help`)\n",
    "report x.py --nproc-per-node 2": "unrecognized arguments: --nproc-per-node 2; did you mean --world-",
    "reprot": "there is no command 'reprot'; did you mean 'report'? (see `ddpcheck --help`)\n",
    "xyz": "there is no command 'xyz'; choose from report, run, hang,",
    "--vresion": "unrecognized arguments: --vresion; did you mean --version? (see `ddpcheck --help`)\n",
    "run --check-slect DDP1 x.py": "unrecognized arguments: --check-slect; did you mean --check-select? (see ",
    "run -o x.html x.py": "unrecognized arguments: -o; did you mean --check-output?",
    "run --epochs 1 x.py": "unrecognized arguments: --epochs; put arguments of the script after the ",
    "run --check-select DDP7 x.py": "--check-select: no rule matches 'DDP7'; see `ddpcheck rules`",
    "run --check-output=a --check-output=b x.py": f"--check-output {TWO_FILES}",
    "run tset_cli.py": "no such file: tset_cli.py; did you mean 'test_cli.py'?",
    "run": "there is no script to run, as in `ddpcheck run ",
    f"run --check-baseline none.json {cli.__file__}": "cannot read none.json: No such file or directory\n",
    "explain DPD101": "no rule matches 'DPD101'; did you mean DDP101 (unused-parameter)?",
    "render r.json -o a --output b": "--output names two files: a and b; leave one out",
    "rules --format html": "there is no choice for --format 'html'; choose from text, json",
}


@pytest.mark.parametrize("command", MEANT)
def test_wrong_usage_is_one_sentence_with_a_suggestion(main, tmp_path: Path, command: str) -> None:
    (tmp_path / "test_cli.py").touch()
    assert_refused(main(*command.split()), MEANT[command].rstrip("\n"))
    if MEANT[command].endswith("\n"):
        assert main(*command.split())[2] == f"ddpcheck: error: {MEANT[command]}"


def test_version_and_helps(main) -> None:
    assert re.match(r"ddpcheck 0\..* \(torch 2\..*, Python 3\..*\)\n", main("--version")[1])
    shown = [main("run", option)[1] for option in ("--help", "--help-all")]
    assert all("--check-parity" in text and "exit codes" in text for text in shown)
    assert ["--rdzv-conf" in text for text in shown] == [False, True] and "--rdzv_conf" not in shown[1]
    code, out, err = main()
    assert (code, out) == (2, "") and "report" in err and "exit codes" in err


@pytest.mark.parametrize("command", list(EXAMPLES))
def test_help_shows_examples_that_can_be_parsed(command: str, main) -> None:
    out = main(*filter(None, [command]), "--help")[1]
    for example, words in EXAMPLES[command]:
        assert example in out and words in out
        asked = shlex.split(example.partition(" > ")[0])[1:]
        if asked[0] != "run":  # whose options are torchrun's
            assert make_parser().parse_args(asked).command


def test_rules_lists_every_rule_as_text_and_as_json_with_all_that_explain_says(main) -> None:
    code, out, _ = main("rules")
    assert code == 0 and all(f"  {rule.code} {rule.name} " in out for rule in RULES.values())
    code, out, _ = main("rules", "--format", "json")
    data = json.loads(out)
    assert code == 0 and [rule["code"] for rule in data["rules"]] == list(RULES) and data["families"]["DDP1"]
    words = "code name severity summary why fix detected ignore line checks reports example explains explained_by"
    assert set(data["rules"][0]) == {*words.split()}
    assert data["rules"][0]["severity"] in ("error", "warning", "note")


def test_a_report_goes_to_stdout_and_decides_the_exit_code(stub_check, main) -> None:
    for report, fail_on, code in (
        (Report("t"), "error", 0),
        (Report("t", findings=(UNUSED, ZERO)), "error", 1),
        (Report("t", findings=(UNUSED,)), "never", 0),
        (Report("t", findings=(ZERO,)), "warning", 1),
        (Report("t", findings=(UNUSED,), error=ReportError("model() raised", 3)), "error", 3),
        (Report("t", error=ReportError("rank 1 is stuck", 4)), "never", 4),
    ):
        stub_check(report)
        ended, out, err = main("report", "t", "--fail-on", fail_on)
        assert (ended, err) == (code, "") and out.startswith("ddpcheck report on t\n")


def test_options_reach_the_check(stub_check) -> None:
    calls = stub_check(Report("t"))
    line = "report net.py:r --steps 5 --timeout 9 --select DDP1,hang --preload json,csv.x --ignore DDP107"
    assert cli.main([*line.split(), "--ignore", "DDP109"]) == 0
    [(target, options)] = calls
    expected = {"steps": 5, "timeout": 9.0, "select": ("DDP1", "hang"), "ignore": ("DDP107", "DDP109")}
    assert target == "net.py:r" and expected.items() <= options.items() and options["preload"] == ("json", "csv.x")


def test_what_cannot_work_is_refused_before_the_work(stub_check, main) -> None:
    calls = stub_check(Report("t"))
    for arguments, sentence in (
        ("--world-size 0", "--world-size: expected a whole number of at least 1, got '0'"),
        ("--format htlm", "there is no format 'htlm'; did you mean 'html'?"),
        ("-o report.pdf", "cannot determine the format from the name 'report.pdf'"),
        ("-o missing/report.json", "cannot write missing/report.json: No such file or directory"),
    ):
        assert_refused(main("report", "t", *arguments.split()), sentence)
    assert calls == []


def test_output_goes_to_a_file_in_the_format_of_its_extension(stub_check, main, tmp_path: Path) -> None:
    stub_check(Report("t", findings=(UNUSED,)))
    message = "ddpcheck: 1 finding (DDP101 error), written to r.json\n"
    assert main("report", "t", "-o", "r.json") == (1, "", message)
    for arguments in ("-o r.txt", "-o r.out --format json"):
        assert main("report", "t", *arguments.split())[:2] == (1, "")
    by_name, by_option = (json.loads((tmp_path / name).read_text()) for name in ("r.json", "r.out"))
    assert by_name.pop("command") == "ddpcheck report t -o r.json"
    assert by_option.pop("command") == "ddpcheck report t -o r.out --format json" and by_name == by_option
    assert "[red]head" in (tmp_path / "r.txt").read_text()


def test_a_report_is_as_long_and_as_coloured_as_asked(stub_check, main) -> None:
    names = tuple(f"layer{number}" for number in range(12))
    finding = Finding("DDP101", names, "Never read.", Severity.ERROR, evidence=tuple(map("line {}".format, range(20))))
    stub_check(Report("t", findings=(finding,)))

    def shown(*options: str) -> str:
        code, out, _ = main("report", "t", *options)
        assert code == 1
        return out

    assert "layer11" not in shown() and "line 19" not in shown()
    assert "layer11" in shown("-v") and "line 19" in shown("--verbose")
    assert shown("-q") == "1 finding (1 error); more on each: ddpcheck explain DDP101\n"
    assert "\x1b[" in shown("--color", "always") and "\x1b[" not in shown("--color", "never")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            TargetError("net.py fails", detail="Traceback:\nNameError: x\n"),
            3,
            "net.py fails\n  Traceback:\n  NameError: x",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_check_that_fails_leaves_no_empty_file_and_keeps_an_old_one(
    stub_check, main, tmp_path: Path, error, code, message
) -> None:
    stub_check(error)
    (tmp_path / "old.json").write_text("old")
    for file in ("new.json", "old.json"):
        assert main("report", "t", "-o", file) == (code, "", f"ddpcheck: error: {message}\n")
    assert not (tmp_path / "new.json").exists() and (tmp_path / "old.json").read_text() == "old"


def test_a_bug_of_ours_is_one_sentence_and_debug_shows_the_traceback(stub_check, main) -> None:
    stub_check(ZeroDivisionError("division\nby zero"))
    assert_refused(main("report", "t"), "ZeroDivisionError: division by zero; this is a bug in ddpcheck: please report")
    for arguments in (["--debug", "report", "t"], ["report", "t", "--debug"]):
        with pytest.raises(ZeroDivisionError):
            main(*arguments)


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
    done = run(sys.executable, "-c", probe)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "closed\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to ask")
def test_ctrl_c_in_the_middle_of_a_run_leaves_no_rank() -> None:
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
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody in the foreground
        assert process.wait(timeout=50) == 130
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
    done = run("bash", "-c", command)
    assert (done.stdout, done.stderr) == ("ddpcheck report on t\n0\n", "")


def test_a_saved_report_renders_as_anything(tmp_path: Path, main, monkeypatch) -> None:
    saved = Report("modèle", findings=(UNUSED,))
    (tmp_path / "r.json").write_text(saved.to_json(), encoding="utf-8")
    code, out, _ = main("render", "r.json")
    assert code == 0 and "[red]head" in out
    assert Report.from_json(main("render", "r.json", "--format", "json")[1]) == saved
    monkeypatch.setattr("sys.stdin", (tmp_path / "r.json").open(encoding="utf-8"))
    assert main("render", "-", "-o", "r.txt")[0] == 0
    assert "modèle" in (tmp_path / "r.txt").read_text(encoding="utf-8")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert cli.main(["render", "r.json"]) == 0
    stream.flush()
    assert rb"mod\xe8le" in stream.buffer.getvalue()


def test_what_is_no_report_is_refused(tmp_path: Path, main) -> None:
    for content, sentence in ((b"{", "r.json is not a report: Expecting"), (b"\xff\xfe", "cannot read r.json")):
        (tmp_path / "r.json").write_bytes(content)
        assert_refused(main("render", "r.json"), sentence)


def test_configuration_reaches_the_command(stub_check, main, tmp_path: Path, monkeypatch) -> None:
    calls = stub_check(Report("t"))
    (tmp_path / "pyproject.toml").write_text("[tool.ddpcheck]\nsteps = 7\nworld-size = 5\n")
    monkeypatch.setenv("DDPCHECK_WORLD_SIZE", "4")
    assert main("report", "t")[0] == 0
    assert (calls[0][1]["steps"], calls[0][1]["world_size"]) == (7, 4)
    (tmp_path / "pyproject.toml").write_text("[tool.ddpcheck]\nstep = 7\n")
    code, _, err = main("report", "t")
    assert code == 2 and "did you mean 'steps'" in err


def test_a_stray_variable_is_warned_of_once_where_it_nearly_is_a_setting(stub_check, main, monkeypatch) -> None:
    stub_check(Report("t"))
    monkeypatch.setenv("DDPCHECK_STEP", "7")
    monkeypatch.setenv("DDPCHECK_LICENCE", "none")
    assert main("report", "t")[::2] == (
        0,
        "ddpcheck: warning: environment variable DDPCHECK_STEP is ignored: ddpcheck has no such setting; did you mean "
        "'DDPCHECK_STEPS'?\n",
    )


def test_the_format_can_be_set_in_the_environment_and_the_command_line_wins(
    stub_check, main, tmp_path: Path, monkeypatch
) -> None:
    stub_check(Report("t"))
    monkeypatch.setenv("DDPCHECK_FORMAT", "json")
    code, as_json, _ = main("report", "t")
    assert code == 0 and json.loads(as_json)["target"] == "t"
    (tmp_path / "r.json").write_text(as_json)
    as_text = main("report", "t", "--format", "text")[1]
    for file, content in (("r.txt", as_text), ("r.out", as_json)):  # an extension that says nothing
        assert main("render", "r.json", "-o", file)[0] == 0
        assert (tmp_path / file).read_text() == content
    monkeypatch.setenv("DDPCHECK_FORMAT", "xml")
    code, _, err = main("report", "t")
    assert code == 2
    assert "no format 'xml', which the environment or pyproject.toml names; the formats" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_standard_output_that_is_full_or_closed_is_said_in_one_sentence() -> None:
    for redirection, reason in ((">/dev/full", "No space left on device"), (">&-", "it is closed")):
        command = f"exec {sys.executable} -m ddpcheck rules {redirection}"
        done = run("sh", "-c", command)  # and no COLUMNS that a library in C has set, as readline does
        assert done.returncode == 2
        assert done.stderr.startswith("ddpcheck: error: cannot write to standard output") and reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
