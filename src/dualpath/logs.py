"""How log lines look: text for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Final

from dualpath.config import LogConfig, LogFormat

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ENGINE_TEXT: Final = "%(asctime)s %(levelname)s {who} %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, ``process`` where
    it has a name, ``rid`` where the line is about one request.

    A record with an attribute ``fields`` (a dict) has those keys instead of ``message``.
    """

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._who:
            line["process"] = self._who
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= fields
        else:
            line["message"] = record.getMessage()
        rid = getattr(record, "rid", None)
        if rid is not None:
            line["rid"] = rid
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def formatter(config: LogConfig, who: str = "") -> logging.Formatter:
    """The formatter of a process called ``who`` (``pe0``; empty where it needs no name)."""
    if config.format is LogFormat.JSON:
        return JsonFormatter(who)
    return logging.Formatter(_ENGINE_TEXT.format(who=who) if who else _TEXT)


def set_up(config: LogConfig, *handlers: logging.Handler) -> None:
    """Log through ``handlers`` (standard error when there are none), in the format configured."""
    for handler in handlers or (logging.StreamHandler(),):
        handler.setFormatter(formatter(config))
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(config.level.upper())


def set_up_engine(config: LogConfig, who: str) -> None:
    """Our own loggers inside a vLLM process, whose root logger is not ours to set; idempotent."""
    ours = logging.getLogger("dualpath")
    if any(getattr(handler, "dualpath_engine", False) for handler in ours.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(config, who))
    handler.dualpath_engine = True  # type: ignore[attr-defined]
    ours.addHandler(handler)
    ours.setLevel(config.level.upper())
    ours.propagate = False
