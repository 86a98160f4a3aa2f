"""The commands. Each imports what it needs when it runs, so that `--help` stays quick."""

from __future__ import annotations

import importlib
import io
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from ampx.errors import InvalidOptionError
from ampx.events import LOG_EVERY

from .terminal import COLORS, Progress, terminal

if TYPE_CHECKING:
    from ampx.run.command import RunRequest

_FRAMEWORK = typer.Option(help="Name of the framework, such as torch.", show_default=False)
_JSON = typer.Option("--json", help="Print JSON instead of tables.")


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield what shows what is done now. A termination (SIGTERM) meanwhile ends the script that the command runs."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with terminal.progress() as progress:
            yield progress
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _written(option: str, target: Path) -> Iterator[None]:
    """Say in a sentence that a file cannot be written any more. It comes last: what was measured is printed by then."""
    try:
        yield
    except OSError as error:
        raise InvalidOptionError(
            f"{option} {str(target)!r} cannot be written: {error.strerror}; accepted: a file that you may write, in a "
            f"folder that stays. What it would say stands above; for the file, run the command again."
        ) from error


def _note_checkpoint(result: dict[str, Any], checkpoint: Path | None) -> None:
    if checkpoint is not None:
        result["notes"].append(f"Steps are counted from the checkpoint on. {checkpoint} is as it was before.")


def _write_report(report: Path | None, result: dict[str, Any], as_json: bool) -> None:
    """Write the report of `compare`, `diagnose` or `tune`, where one was asked for, and say where it is."""
    if report is not None:
        from ampx.numerics.report import write

        with _written("--report", report):
            write(report, result)
        if not as_json:
            terminal.remark(f"Report: {report}")


class StartProgram(BaseException):
    """Carries a request out of the command line's parser, which would catch exceptions that are the script's."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request


app = typer.Typer(
    help="One mixed-precision training API for every framework.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# typer comes with click inside of it, or beside it, by its version.
_UsageError: Final = cast("type[Exception]", typer.BadParameter.__bases__[0])


def run() -> int:
    """Run the command line; return the exit code."""
    from ampx.errors import AmpxError, FrameworkNotInstalledError, UnknownFrameworkError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows question marks, no traceback
    try:
        return _run()
    except AmpxError as error:
        terminal.error(str(error))
        # One that `ampx demo` looked for by itself and did not find has no name.
        absent = isinstance(error, FrameworkNotInstalledError) and error.name is not None
        return 2 if absent or isinstance(error, (InvalidOptionError, UnknownFrameworkError)) else 1


def _run() -> int:
    arguments, launched = sys.argv[1:], []
    # torch.distributed.launch puts its own argument first, before the command's name; it is meant for the script.
    if arguments[:1] and arguments[0].startswith(("--local-rank=", "--local_rank=")) and "run" in arguments[1:2]:
        launched, arguments = arguments[:1], arguments[1:]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    try:
        return int(app(arguments, obj=launched, standalone_mode=False) or 0)
    except _UsageError as error:
        return _refuse(error)
    except StartProgram as start:
        request = start.request
    from ampx.run.command import run_to_the_end

    return run_to_the_end(request)  # here, so that no exception of the script has one of ours as its context


def _refuse(error: Any) -> int:
    """Say what is wrong with the options, in the style of all errors; return the exit code."""
    if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
        message = error.format_message().rstrip(".")
        where = "ampx" if error.ctx is None else error.ctx.command_path
        terminal.error(f"{message}{'' if message[-1] == '?' else '.'} `{where} --help` lists what is accepted.")
    return int(error.exit_code)


def _show_version(wanted: bool) -> None:
    if wanted:
        import ampx

        typer.echo(f"ampx {ampx.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at a machine, at the backends, and at a model that trains in mixed precision."""
    from .settings import defaults

    group: Any = context.command
    context.default_map = defaults(group.commands, Path.cwd())


def _color(name: str) -> str:
    if name not in COLORS:
        raise InvalidOptionError(f"--color {name!r} is no choice; accepted: {', '.join(COLORS)}. Pass one of these.")
    terminal.colored = COLORS[name]
    return name


def _quiet(wanted: bool) -> bool:
    terminal.quiet = wanted
    return wanted


def _spelled(dtype: str) -> str:
    from ampx.formats import spelled

    return spelled(dtype)


# Every command has these two.
_QUIET = typer.Option("-q", "--quiet", callback=_quiet, help="Print no progress and no remarks.")
_COLOR = typer.Option(callback=_color, help="Colour: auto, always or never.")
_DTYPE = typer.Option(help="As in ampx.init: auto, float16 or bfloat16.", callback=_spelled)
_LEVEL = typer.Option(help="As in ampx.init.")
_DEVICE = typer.Option(help="As in ampx.init.")
_SCRIPT = typer.Argument(metavar="SCRIPT", help="The script to run.", show_default=False)
_ARGUMENTS = typer.Argument(metavar="ARGS", help="The script's own arguments.", show_default=False)
_PATHS = typer.Argument(metavar="PATH", help="Files, and folders to search.", show_default=False)
_MODULE = typer.Option("-m", help="SCRIPT is the name of a module, as after python -m.")
_STEPS = typer.Option(min=1, help="End every run after so many steps.")
_PAGE = typer.Option(dir_okay=False, help="Write a report: out.html or out.json.", show_default=False)
_SEED = typer.Option(help="What the random numbers of every run start from.")
_CHECKPOINT = typer.Option(
    "--from",
    exists=False,
    help="A checkpoint that the script resumes from, and may write: every run starts from it.",
    show_default=False,
)
_OWN = typer.Option("--replace-native", help="Carry out the script's own mixed precision with ampx.")


# `--help` lists the commands in this order: the most wanted first. It keeps the
# line ends of all paragraphs but the first, so those lines are short.
# What follows the script's name is the script's: parsing stops there.
@app.command("run", context_settings={"allow_interspersed_args": False})
def run_script(
    context: typer.Context,
    script: Annotated[str, _SCRIPT],
    arguments: Annotated[list[str] | None, _ARGUMENTS] = None,
    framework: Annotated[str | None, _FRAMEWORK] = None,
    dtype: Annotated[str, _DTYPE] = "auto",
    level: Annotated[str, _LEVEL] = "O1",
    device: Annotated[str, _DEVICE] = "auto",
    is_module: Annotated[bool, _MODULE] = False,
    replace_native: Annotated[bool, _OWN] = False,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a report: out.json or out.html.", show_default=False)
    ] = None,
    unchanged: Annotated[
        bool,
        typer.Option("--unchanged-if-refused", help="Run the script again without ampx where ampx refuses it."),
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Take the settings from a file of ampx tune.", show_default=False),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Log loss scale, skips and norms: to x.jsonl, tensorboard:DIR, wandb:PROJECT, mlflow:URI. Repeatable.",
            show_default=False,
        ),
    ] = None,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between two rows of --log.")] = LOG_EVERY,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, on the standard error, instead of the summary.")
    ] = False,
    stand_ins_only: Annotated[bool, typer.Option("--stand-ins-only", hidden=True)] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Train an unedited script in mixed precision, and report what happened when it ends."""
    from ampx.run import RunSettings
    from ampx.run.command import RunRequest, check_report
    from ampx.run.program import Program

    check_report(report)
    program = Program(script, is_module, (*context.obj, *(arguments or ())))
    settings = RunSettings(dtype, level, device, replace_native, stand_ins_only)
    if policy is not None:
        settings = settings.by_policy(policy)
    request = RunRequest(program, settings, framework, report, unchanged, tuple(log or ()), log_every, as_json, quiet)
    raise StartProgram(request)


@app.command(context_settings={"allow_interspersed_args": False})
def compare(
    script: Annotated[str, _SCRIPT],
    arguments: Annotated[list[str] | None, _ARGUMENTS] = None,
    dtype: Annotated[str, typer.Option(help="Compare float32 with these, with commas between.")] = "auto",
    steps: Annotated[int, _STEPS] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each dtype.")] = 3,
    checkpoint: Annotated[Path | None, _CHECKPOINT] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Time it for several values of an option: '--batch-size=32,64'.", show_default=False),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write a report: out.html, out.png or out.json.", show_default=False),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
    framework: Annotated[str | None, _FRAMEWORK] = None,
    level: Annotated[str, _LEVEL] = "O1",
    device: Annotated[str, _DEVICE] = "auto",
    seed: Annotated[int, _SEED] = 0,
    is_module: Annotated[bool, _MODULE] = False,
    replace_native: Annotated[bool, _OWN] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Run an unedited script in float32 and in mixed precision, and say whether it is right and worth it."""
    from ampx.numerics import compare_script
    from ampx.numerics.checkpoint import started_from
    from ampx.numerics.report import KINDS
    from ampx.run import RunSettings
    from ampx.run.command import check_report
    from ampx.run.program import Program

    check_report(report, KINDS)
    dtypes = compare_script.parse_dtypes(dtype)
    swept = None if sweep is None else compare_script.Sweep.parse(sweep)
    with _progress() as progress, started_from(checkpoint) as run:
        result = compare_script.compare_script(
            Program(script, is_module, tuple(arguments or ())),
            RunSettings(level=level, device=device, replace_native=replace_native),
            dtypes,
            framework=framework,
            steps=steps,
            repeats=repeats,
            seed=seed,
            sweep=swept,
            run=run,
            progress=progress,
        )
    _note_checkpoint(result, checkpoint)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        from .compare_command import print_comparison, wide_console

        print_comparison(wide_console(), result)
    _write_report(report, result, as_json)
    raise typer.Exit(1 if result["failed"] else 0)


@app.command(context_settings={"allow_interspersed_args": False})
def diagnose(
    script: Annotated[str, _SCRIPT],
    arguments: Annotated[list[str] | None, _ARGUMENTS] = None,
    at: Annotated[int | None, typer.Option(min=1, help="Look at this step.", show_default=False)] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Wait no longer than so many steps for a failure.", show_default=False)
    ] = None,
    checkpoint: Annotated[Path | None, _CHECKPOINT] = None,
    dtype: Annotated[str, _DTYPE] = "auto",
    report: Annotated[Path | None, _PAGE] = None,
    as_json: Annotated[bool, _JSON] = False,
    framework: Annotated[str | None, _FRAMEWORK] = None,
    level: Annotated[str, _LEVEL] = "O1",
    device: Annotated[str, _DEVICE] = "auto",
    seed: Annotated[int, _SEED] = 0,
    is_module: Annotated[bool, _MODULE] = False,
    replace_native: Annotated[bool, _OWN] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Run an unedited script until it fails, and say in which module and operation, why, and what to do."""
    from ampx.numerics.checkpoint import started_from
    from ampx.numerics.diagnose_script import diagnose_script
    from ampx.run import RunSettings
    from ampx.run.command import check_report
    from ampx.run.program import Program

    check_report(report)
    with _progress() as progress, started_from(checkpoint) as run:
        diagnosis, result = diagnose_script(
            Program(script, is_module, tuple(arguments or ())),
            RunSettings(dtype, level, device, replace_native),
            framework=framework,
            at=at,
            steps=steps,
            seed=seed,
            run=run,
            progress=progress,
        )
    _note_checkpoint(result, checkpoint)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        if diagnosis is None:
            terminal.say(result["verdict"])
            for risk in result["risks"]:
                terminal.say(f"  risk: {risk['text']}")
        else:
            terminal.say("\n".join([result["verdict"], *str(diagnosis).splitlines()[1:]]))
        for mistake in result["mistakes"]:
            terminal.say(f"mistake: {mistake}")
        for note in result["notes"]:
            terminal.say(f"note: {note}")
    _write_report(report, result, as_json)


@app.command(context_settings={"allow_interspersed_args": False})
def tune(
    script: Annotated[str, _SCRIPT],
    arguments: Annotated[list[str] | None, _ARGUMENTS] = None,
    steps: Annotated[int, _STEPS] = 20,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="How far losses may be from float32's: 0.01 is 1 %.", show_default=False),
    ] = None,
    purpose: Annotated[str, typer.Option("--for", help="training, or inference: outputs only.")] = "training",
    what_if: Annotated[
        str | None,
        typer.Option(help="Answer for a dtype that is simulated, such as float8_e4m3.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", dir_okay=False, help="The policy file to write.")] = Path(
        "ampx.toml"
    ),
    checkpoint: Annotated[Path | None, _CHECKPOINT] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure a policy file that is there anew.")] = False,
    dtype: Annotated[str, _DTYPE] = "auto",
    repeats: Annotated[int, typer.Option(min=0, help="Rounds of timed runs; 0: no speed.")] = 3,
    report: Annotated[Path | None, _PAGE] = None,
    as_json: Annotated[bool, _JSON] = False,
    framework: Annotated[str | None, _FRAMEWORK] = None,
    device: Annotated[str, _DEVICE] = "auto",
    seed: Annotated[int, _SEED] = 0,
    is_module: Annotated[bool, _MODULE] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Find which modules of an unedited script stay in float32, by runs of it, and write a policy file."""
    from ampx.numerics import tune_script
    from ampx.numerics.checkpoint import started_from
    from ampx.numerics.report import exclusion_lines
    from ampx.run import RunSettings
    from ampx.run.command import check_report
    from ampx.run.program import Program

    check_report(report)
    simulated = tune_script.check_options(purpose, what_if, out, force)
    with _progress() as progress, started_from(checkpoint) as run:
        policy, result = tune_script.tune_script(
            Program(script, is_module, tuple(arguments or ())),
            RunSettings(dtype, "O1", device),
            framework=framework,
            steps=steps,
            tolerance=tolerance,
            for_inference=purpose == "inference",
            what_if=simulated,
            repeats=repeats,
            seed=seed,
            progress=progress,
            journal=Path(f"{out}.search"),
            out=str(out),
            checkpoint=checkpoint,
            run=run,
        )
    _note_checkpoint(result, checkpoint)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        terminal.say(result["verdict"])
        for choice in policy.deny:
            terminal.say(f"  {choice.entry:<32} {choice.reason}")
        if policy.operations:
            terminal.say(f"  instead of the modules, wherever they are: {', '.join(policy.operations)}")
        for line in exclusion_lines(result["exclusions"]):
            typer.echo(f"  {line}")
        for note in result["notes"]:
            terminal.say(f"note: {note}")
    if simulated is None:
        with _written("--out", out):
            policy.write(out)
        if not as_json:
            by_hand = " and ".join(result["lines"])
            terminal.remark(
                f"Written: {out}; use it by ampx run --policy {out}, or by {by_hand} before wrap_optimizer."
            )
    _write_report(report, result, as_json)


@app.command()
def lint(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH", help="Files, and folders to search; - is the standard input. Default: .", show_default=False
        ),
    ] = None,
    select: Annotated[str, typer.Option(help="Only these rules: AMP101,AMP2; what codes begin with.")] = "",
    ignore: Annotated[str, typer.Option(help="Not these rules.")] = "",
    exclude: Annotated[str, typer.Option(help="Not these files and folders: patterns, such as 'tests/*'.")] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Fix what can be fixed safely; see the manual.")] = False,
    style: Annotated[str, typer.Option("--output-format", "--format", help="text, json, github or sarif.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output-format json.")] = False,
    explain: Annotated[str | None, typer.Option(help="Say what a rule is about.", show_default=False)] = None,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Find misuse of mixed precision in code, without running it.

    A comment `# ampx: ignore[AMP101]` at the end of a line opts out there.
    The exit code is 0 if nothing is found, 1 if something is, and 2 if a file
    cannot be read.
    """
    from . import lint_command

    code = lint_command.run(
        paths or [],
        select=select,
        ignore=ignore,
        exclude=exclude,
        style="json" if as_json else style,
        explain=explain,
        fix=fix,
        echo=typer.echo,
    )
    raise typer.Exit(code)


@app.command()
def migrate(
    paths: Annotated[list[Path], _PATHS],
    diff: Annotated[bool, typer.Option("--diff", help="Print the changes as a unified diff.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Make the changes.")] = False,
    check: Annotated[bool, typer.Option("--check", help="End with exit code 1 if a file would change.")] = False,
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Rewrite scripts that use apex.amp, torch.amp, MXNet's, Paddle's or TensorFlow's AMP into calls of ampx.

    Without --write nothing is changed. What needs a human is listed with file
    and line. The exit code is 0 if that is nothing, 1 if it is something, and 2
    if a file cannot be read or written.
    """
    from . import migrate_command

    code = migrate_command.migrate(paths, diff=diff, write=write, check=check, as_json=as_json, echo=typer.echo)
    raise typer.Exit(code)


@app.command()
def doctor(
    framework: Annotated[str | None, _FRAMEWORK] = None,
    as_json: Annotated[bool, _JSON] = False,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds until an import counts as broken.")] = 120.0,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Print what this machine can do in mixed precision, and what is broken.

    The exit code is 0 if the framework (without one: any) can train in mixed
    precision here, else 1.
    """
    from . import doctor as findings

    with terminal.progress("Importing the frameworks, each in a process of its own …"):
        report = findings.examine(framework, time_limit)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        from .render import print_doctor

        print_doctor(terminal.console(), report)
    raise typer.Exit(0 if report["mixed_precision"] else 1)


@app.command()
def backends(
    as_json: Annotated[bool, _JSON] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Show what each backend declares."""
    from . import capability_table as table

    with terminal.progress("Loading the backends, each in a process of its own …"):
        declared, broken = table.collect()
    if as_json:
        typer.echo(json.dumps(table.to_json(declared, broken), indent=2))
    elif as_markdown:
        typer.echo(table.to_markdown(declared))
    else:
        from .render import print_backends

        print_backends(terminal.console(), declared, broken)


@app.command()
def demo(
    framework: Annotated[str | None, _FRAMEWORK] = None,
    everywhere: Annotated[
        bool, typer.Option("--all", help="Train with every framework installed, each in a process of its own.")
    ] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where JSON and pictures go.")] = Path("ampx-demo"),
    as_json: Annotated[bool, _JSON] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 15,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step.")] = 32,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Compare float32 with this dtype only; may be repeated.", show_default=False),
    ] = None,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Train a convolutional network on handwritten digits in float32 and in mixed precision."""
    from . import demo_command

    options: dict[str, Any] = {
        "dtypes": dtype or [],
        "seeds": demo_command.parse_seeds(seeds),
        "epochs": epochs,
        "batch_size": batch_size,
    }
    if everywhere:
        demo_command.refuse_both(framework)
    else:
        framework = demo_command.find_framework(framework)
    # A missing extra is an error before the training, not after. The extra of scikit-learn brings matplotlib, too.
    for module in ("sklearn", "matplotlib.figure"):
        importlib.import_module(module)

    demo_command.make_folder(out)
    if framework is None:
        raise typer.Exit(_demo_everywhere(out, options, as_json))
    results, notes = demo_command.train(framework, **options)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        from .render import print_demo

        print_demo(terminal.console(), results, notes)
    with _written("--out", out):
        demo_command.write(out, results)
    if not as_json:
        terminal.remark(f"Curves and loss scale: {out / 'demo.png'}; all numbers: {out / 'results.json'}")


def _demo_everywhere(out: Path, options: dict[str, Any], as_json: bool) -> int:
    from . import demo_command as demo_all

    with terminal.progress("Looking for frameworks …") as progress:
        outcomes = demo_all.train_everywhere(out, options, lambda name: progress(f"Training with {name} …"))
    comparison = demo_all.write_comparison(out, outcomes)
    if as_json:
        typer.echo(json.dumps(comparison, indent=1))
    else:
        from .render import print_all

        print_all(terminal.console(), outcomes)
        where = f"{out / 'comparison.png'}, and for each framework in a folder of its name"
        terminal.remark(f"Curves and loss scales: {where}; numbers: {out / 'comparison.json'}")
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


@app.command("new-backend")
def new_backend(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the framework's module, such as mylib.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder in which the package's folder is made.")] = Path(),
    as_json: Annotated[bool, _JSON] = False,
    quiet: Annotated[bool, _QUIET] = False,
    color: Annotated[str, _COLOR] = "auto",
) -> None:
    """Write the package of a backend for another framework, ready to be filled in."""
    from .new_backend import SCHEMA, write_package
    from .render import print_new_backend

    folder, written = write_package(name, out)
    if as_json:
        files = [{"path": str(file.path), "purpose": file.purpose} for file in written]
        typer.echo(json.dumps({"schema": SCHEMA, "folder": str(folder), "files": files}, indent=2))
    elif not terminal.quiet:
        print_new_backend(terminal.console(), name, folder, written)
