"""What the command line says beside the engine's options, checked before anything is bound or loaded.

cli.py makes a `ServerOptions`; server.py serves by it.
"""

from __future__ import annotations

import math
import re
import ssl
from dataclasses import dataclass

from aserve import ConfigError, SlowReader
from routes.logs import LogFormat

_LEAST = (  # name, bound, whether it may be the bound itself
    ("max_body_bytes", 1, True),
    ("ping_interval", 0, False),
    ("resume_grace", 0, True),
    ("max_resume_grace", 0, True),
    ("journal_bytes", 1, True),
    ("max_unsent_bytes", 1, True),
    ("max_requests_per_key", 1, True),
    ("drain_timeout", 0, True),
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the command line says beside the engine's options."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_requests_per_key: int | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    ping_interval: float = 15.0
    resume_grace: float = 0.0
    max_resume_grace: float = 60.0
    journal_bytes: int = 1 << 20
    slow_client: SlowReader = "coalesce"
    max_unsent_bytes: int = 1 << 20
    log_requests: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    drain_timeout: float = 30.0
    exit_on_death: bool = True
    log_level: str = "info"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None  # a collector of OpenTelemetry spans
    root_path: str = ""  # where a proxy mounts the server
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    profile: str | None = None  # a directory for the steps' times and a trace
    app: str | None = None  # pkg.module:create_app

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the option, for a value that could not serve."""
        for name, least, inclusive in _LEAST:
            value = getattr(self, name)
            if value is not None and not (least <= value < math.inf if inclusive else least < value < math.inf):
                bound = "at least" if inclusive else "more than"
                raise ConfigError(f"{_flag(name)} must be {bound} {least}, got {value}", param=name)
        for name in ("served_model_names", "api_keys"):
            if any(not text.strip() for text in getattr(self, name)):
                raise ConfigError(f"{_flag(name)[:-1]} must not be empty", param=name)
        if self.max_requests_per_key is not None and not self.api_keys:
            raise ConfigError("--max-requests-per-key needs --api-key", param="max_requests_per_key")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-origin must be * or scheme://host[:port], got {origin!r}", param="cors_origins"
                )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path must begin with a slash and not end with one, got {self.root_path!r}", param="root_path"
            )

    def check_certificate(self) -> None:
        """Raises ConfigError where the files are not a certificate and its key."""
        if self.ssl_keyfile is None and self.ssl_certfile is None:
            return
        if self.ssl_keyfile is None or self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together", param="ssl_keyfile")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:  # ssl.SSLError is one
            files = f"{self.ssl_certfile} and {self.ssl_keyfile}"
            raise ConfigError(f"--ssl-certfile and --ssl-keyfile: {files}: {error}", param="ssl_certfile") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
