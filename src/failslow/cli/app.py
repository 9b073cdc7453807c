"""The `failslow` application: its commands, and what becomes of every error.

In: arguments. Out: an exit code. A mistake of the user is one line on stderr and exit code 1:

    $ failslow analyze --min-slowdown 0.9 train.log
    failslow: min_slowdown = 0.9 from --min-slowdown: Input should be greater than 1
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from failslow.cli import (
    act,
    analyze,
    demo,
    doctor,
    inject,
    probe,
    replay,
    report,
    run,
    simulate,
    status,
    study,
    whatif,
)
from failslow.cli.output import emit, lenient_streams, report_error
from failslow.errors import FailslowError

__all__ = ["app", "main"]

# the base of "no such option", "missing argument" and their kin
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Group(TyperGroup):
    """Commands whose errors are one line on stderr, and never a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command of `args`; with `standalone_mode` leave with its exit code."""
        lenient_streams()
        try:
            result = super().main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
            code = result if isinstance(result, int) else 0
        except _UsageError as error:
            code = _usage(error)
        except FailslowError as error:
            report_error(str(error))
            code = 1
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except Exception as error:  # a bug of ours is still no reason to show a traceback
            if os.environ.get("FAILSLOW_DEBUG"):
                raise
            report_error(
                f"internal error: {type(error).__name__}: {error}; "
                "FAILSLOW_DEBUG=1 shows where, please report it"
            )
            code = 1
        if standalone_mode:
            sys.exit(code)
        return code


app = typer.Typer(
    name="failslow",
    cls=_Group,
    help="Notice that a training job has become slow, and who is to blame.",
    epilog="Start with [bold]failslow analyze train.log[/bold] on a log you have.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("analyze", epilog=analyze.EXAMPLES)(analyze.analyze)
app.command("study", epilog=study.EXAMPLES)(study.study)
app.command("run", epilog=run.EXAMPLES, context_settings={"allow_interspersed_args": False})(
    run.run
)
app.add_typer(inject.commands, name="inject")
app.command("status", epilog=status.EXAMPLES)(status.status)
app.command("act", epilog=act.EXAMPLES)(act.act)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("replay", epilog=replay.EXAMPLES)(replay.replay)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.add_typer(probe.commands, name="probe")
app.command("whatif", epilog=whatif.EXAMPLES)(whatif.whatif)
app.command("simulate", epilog=simulate.EXAMPLES)(simulate.simulate)


@app.command("version", epilog="Example: failslow version")
def version() -> None:
    """Print the version."""
    _print_version(True)


def _print_version(wanted: bool) -> None:
    if wanted:
        import failslow

        emit(f"failslow {failslow.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None and not version:
        emit(context.get_help().rstrip() + "\n")


def _usage(error: Exception) -> int:
    """One line: what was wrong with the arguments, and where to read on."""
    message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    message = message.replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "failslow"
    report_error(f"{message.rstrip('.')}; see {command} --help")
    return 1


def main() -> None:
    """Entry point of the `failslow` command."""
    app(prog_name="failslow")
