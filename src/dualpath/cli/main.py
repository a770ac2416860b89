"""``dualpath COMMAND``: parse, call, print. One file a command; see ``dualpath --help``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Final

import typer
from typer.exceptions import TyperException

from dualpath import __version__
from dualpath.config import ConfigError

EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130

COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "up": "up_command",
        "serve": "serve_command",
        "engine": "engine_command",
        "replay": "replay_command",
        "profile": "profile_command",
        "demo": "demo_command",
        "doctor": "doctor_command",
        "simulate": "simulate_command",
        "plan": "plan_command",
        "timeline": "timeline_command",
        "reproduce": "reproduce_command",
        "report": "report_command",
        "trace": "trace_app",
        "store": "store_app",
        "qos": "qos_app",
        "lab": "lab_app",
    }
)
"""What each command's module, ``dualpath.cli.NAME``, calls it: a function, or an app of its own.

A command's module is imported only when the command is run: plots, servers and traces together
take two seconds to import, which is too much for a command that only prints a line.
"""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dualpath {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Options of the program itself."""


def build(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The program with these of its commands."""
    app = typer.Typer(
        name="dualpath",
        help="Agents served by vLLM prefill and decode pools whose KV-cache lives on storage.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # it would swallow the defaults, which stand in square brackets
        add_completion=False,
    )
    app.callback()(_options)
    for name in names:
        command = getattr(import_module(f"dualpath.cli.{name}"), COMMANDS[name])
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def run(arguments: list[str]) -> int:
    """Run one command; its exit status. Bad input is one line on stderr and status 2."""
    try:
        app = build([arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS)
        status = app(arguments or ["--help"], prog_name="dualpath", standalone_mode=False)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except TyperException as error:
        print(_usage_line(error), file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def _usage_line(error: TyperException) -> str:
    """Wrong options in one line; a group called without a command shows its help."""
    text = error.format_message()
    return text if text.lstrip().startswith("Usage:") else "error: " + " ".join(text.split())


def main() -> None:
    """Entry point of the ``dualpath`` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
